// Runs an exported model: serve LIBRARY INPUT OUTPUT EXTENT...
//
// INPUT holds the float32 values of the model's one input, of shape EXTENT...; OUTPUT gets those of its one output.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <vector>

namespace ffi = tvm::ffi;

// Memory of a tensor, aligned as TVM's kernels expect it.
struct Aligned {
  void AllocData(DLTensor* tensor) {
    size_t bytes = (ffi::GetDataSize(*tensor) + 63) / 64 * 64;
    tensor->data = std::aligned_alloc(64, bytes);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

int main(int argc, char** argv) {
  if (argc < 5) {
    std::cerr << "usage: serve LIBRARY INPUT OUTPUT EXTENT...\n";
    return 2;
  }
  ffi::Module library = ffi::Module::LoadFromFile(argv[1]);
  ffi::Module machine = library->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
  const int pooled = 2;  // of the virtual machine's allocators, the one that keeps its memory
  machine->GetFunction("vm_initialization").value()(static_cast<int>(kDLCPU), 0, pooled);
  ffi::Function run = machine->GetFunction("main").value();

  std::vector<int64_t> shape;
  for (int i = 4; i < argc; ++i) shape.push_back(std::atoll(argv[i]));
  const DLDevice cpu{kDLCPU, 0};
  auto input = ffi::Tensor::FromNDAlloc(Aligned(), ffi::ShapeView(shape.data(), shape.size()),
                                        DLDataType{kDLFloat, 32, 1}, cpu);
  std::ifstream(argv[2], std::ios::binary)
      .read(static_cast<char*>(input.data_ptr()), ffi::GetDataSize(*input.GetDLTensorPtr()));

  auto output = run(input).cast<ffi::Tensor>();
  std::ofstream(argv[3], std::ios::binary)
      .write(static_cast<const char*>(output.data_ptr()), ffi::GetDataSize(*output.GetDLTensorPtr()));
}
