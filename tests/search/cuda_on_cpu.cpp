// The machine of cuda_on_cpu.h: its threads, their blocks, and what is on its way to shared memory.
#include "cuda_on_cpu.h"

#pragma GCC visibility push(hidden)
dim3 threadIdx, blockIdx;
alignas(1024) uchar buf_dyn_shmem_ptr[256 * 1024 + FENCE_BYTES];
SHARED static uchar no_static_memory[64];
extern uchar __start_shared_memory[], __stop_shared_memory[];
void** held;
int backwards;

namespace machine {

std::vector<Thread> threads;
int current, block_threads;
static int shared_bytes;
static dim3 block;
static ucontext_t scheduler;
static void (*body)();

void pause(State state) {
  threads[current].state = state;
  swapcontext(&threads[current].context, &scheduler);
}
static void enter() {
  body();
  pause(done);
}
static void place(int index) {
  current = index;
  threadIdx = {index % block.x, index / block.x % block.y, index / block.x / block.y};
}
// Whether all of [from, to) that are alive wait in `state`, and one of them is alive.
static bool all_wait(int from, int to, State state) {
  bool alive = false;
  for (int i = from; i < to; ++i) {
    if (threads[i].state == done) continue;
    if (threads[i].state != state) return false;
    alive = true;
  }
  return alive;
}
static void release(int from, int to) {
  for (int i = from; i < to; ++i)
    if (threads[i].state != done) threads[i].state = ready;
}
static void run_block() {
  std::memset(buf_dyn_shmem_ptr, 0xff, shared_bytes + FENCE_BYTES);
  std::memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
  for (auto& thread : threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    thread.state = ready;
    thread.issued.clear();
    thread.groups.clear();
    thread.products.clear();
    makecontext(&thread.context, enter, 0);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (int n = 0; n < block_threads; ++n) {
      int index = backwards ? block_threads - 1 - n : n;
      if (threads[index].state != ready) continue;
      place(index);
      moved = true;
      swapcontext(&scheduler, &threads[index].context);
    }
    for (int warp = 0; warp < block_threads; warp += 32) {
      int end = min(warp + 32, block_threads);
      if (all_wait(warp, end, at_warp)) release(warp, end), moved = true;
    }
    if (all_wait(0, block_threads, at_block)) release(0, block_threads), moved = true;
  }
  for (auto& thread : threads)
    if (thread.state != done) std::fprintf(stderr, "threads wait for each other\n"), std::abort();
  for (int i = 0; i < FENCE_BYTES; ++i)
    if (buf_dyn_shmem_ptr[shared_bytes + i] != 0xff)
      std::fprintf(stderr, "written beyond shared memory\n"), std::abort();
}
void launch(dim3 grid, dim3 threads_of_block, int dynamic_bytes, void (*kernel)()) {
  block = threads_of_block;
  shared_bytes = dynamic_bytes;
  block_threads = block.x * block.y * block.z;
  body = kernel;
  threads.assign(block_threads, Thread{});
  for (auto& thread : threads) thread.stack.resize(64 * 1024);
  for (int z = 0; z < grid.z; ++z)
    for (int y = 0; y < grid.y; ++y)
      for (int x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        run_block();
      }
}
void copy_later(void* to, const void* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
    std::fprintf(stderr, "an asynchronous copy of %d bytes is not aligned\n", bytes), std::abort();
  std::memset(to, 0xff, bytes);
  threads[current].issued.push_back({to, from, bytes});
}
void commit() {
  threads[current].groups.push_back(std::move(threads[current].issued));
  threads[current].issued.clear();
}
void wait(size_t in_flight) {
  auto& groups = threads[current].groups;
  for (; groups.size() > in_flight; groups.pop_front())
    for (auto& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
}
// ldmatrix.x4 of b16 (PTX ISA): thread 8 q + r gives the address of row r of matrix q; thread 4 r + c gets its word c.
void load_matrices(void* to, const void* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16) std::fprintf(stderr, "a row of ldmatrix is not aligned\n"), std::abort();
  give(row);
  int lane = current % 32;
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int half = 0; half < 2; ++half) {
      int r = lane / 4, c = lane % 4 * 2 + half;
      if (transposed) std::swap(r, c);
      std::memcpy((uint16_t*)to + 2 * matrix + half, (const uint16_t*)given(8 * matrix + r, 0) + c, 2);
    }
  pause(at_warp);
}

void finish() {
  for (auto& product : threads[current].products) product();
  threads[current].products.clear();
}

}  // namespace machine
#pragma GCC visibility pop
