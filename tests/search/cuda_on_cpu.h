// Enough of CUDA to run generated kernels on a CPU: threads are coroutines, and blocks run one after another.
//
// Barriers are honoured and nothing else orders threads, so a missing one shows: threads run in either order. Shared
// memory starts as NaN, in every block. Asynchronous copies arrive only when they are waited for, and their target is NaN until then.
// What is the same for every kernel is in cuda_on_cpu.cpp, which is compiled once.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

using uchar = unsigned char;
using uint = unsigned int;
using half = _Float16;
struct dim3 { int x, y, z; };
#pragma GCC visibility push(hidden)  // each library has a machine of its own
extern dim3 threadIdx, blockIdx;

struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  nv_bfloat16(const nv_bfloat16&) = default;
  nv_bfloat16(const volatile nv_bfloat16& other) : bits(other.bits) {}
  nv_bfloat16(float x) {
    uint all;
    std::memcpy(&all, &x, 4);
    bits = (x == x ? all + 0x7fff + (all >> 16 & 1) : all) >> 16;
  }
  nv_bfloat16& operator=(const nv_bfloat16&) = default;
  void operator=(const nv_bfloat16& other) volatile { bits = other.bits; }
  operator float() const {
    uint all = uint(bits) << 16;
    float x;
    std::memcpy(&x, &all, 4);
    return x;
  }
};
inline nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
#define ROUNDED(op) \
  inline nv_bfloat16 operator op(nv_bfloat16 x, nv_bfloat16 y) { return float(x) op float(y); }
ROUNDED(+)
ROUNDED(-)
ROUNDED(*)
ROUNDED(/)
#define NARROW(name, function) \
  inline half name(half x) { return half(function(float(x))); } \
  inline nv_bfloat16 name(nv_bfloat16 x) { return function(float(x)); }
NARROW(hexp, std::exp)
NARROW(hlog, std::log)
NARROW(hsqrt, std::sqrt)
NARROW(hrsqrt, 1.0f / std::sqrt)
NARROW(htanh, std::tanh)
NARROW(herf, std::erf)
NARROW(__habs, std::fabs)

template <class T, int N> struct alignas(sizeof(T) * N) vec;
template <class T> struct alignas(sizeof(T) * 2) vec<T, 2> { T x, y; };
template <class T> struct alignas(sizeof(T) * 4) vec<T, 4> { T x, y, z, w; };
#define VECTORS(type) \
  using type##2 = vec<type, 2>; using type##4 = vec<type, 4>; \
  inline type##2 make_##type##2(type x, type y) { return {x, y}; } \
  inline type##4 make_##type##4(type x, type y, type z, type w) { return {x, y, z, w}; }
using ushort = unsigned short;
using longlong = long long;
using ulonglong = unsigned long long;
VECTORS(float)
VECTORS(double)
VECTORS(int)
VECTORS(uint)
VECTORS(char)
VECTORS(uchar)
VECTORS(short)
VECTORS(ushort)
VECTORS(longlong)
VECTORS(ulonglong)
VECTORS(half)
VECTORS(nv_bfloat16)
struct half2_bits { half x, y; };
inline uint __pack_half2(half x, half y) {
  half2_bits two{x, y};
  uint bits;
  std::memcpy(&bits, &two, 4);
  return bits;
}
#define CUDART_INF_F INFINITY
#define CUDART_INF double(INFINITY)
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline half __float2half_rn(float x) { return half(x); }
using std::max;
using std::min;

constexpr int FENCE_BYTES = 1024;
extern uchar buf_dyn_shmem_ptr[256 * 1024 + FENCE_BYTES];
#define SHARED __attribute__((section("shared_memory"), used))
extern void** held;
extern int backwards;

namespace machine {

enum State { ready, at_block, at_warp, done };
struct Copy { void* to; const void* from; int bytes; };
struct Thread {
  ucontext_t context;
  State state;
  std::vector<char> stack;
  std::vector<Copy> issued;
  std::deque<std::vector<Copy>> groups;
  std::vector<std::function<void()>> products;
  uint64_t lane_value;
  const void* given[2];
};
extern std::vector<Thread> threads;
extern int current, block_threads;

void pause(State state);
void launch(dim3 grid, dim3 threads_of_block, int dynamic_bytes, void (*kernel)());
void copy_later(void* to, const void* from, int bytes);
void commit();
void wait(size_t in_flight);
void load_matrices(void* to, const void* row, bool transposed);
void finish();

// What is loaded or stored at once; a thread's own arrays lie in registers.
template <class V, class P> V& aligned(P* address) {
  auto where = reinterpret_cast<uintptr_t>(address);
  auto& stack = threads[current].stack;
  bool own = where - reinterpret_cast<uintptr_t>(stack.data()) < stack.size();
  if (!own && where % sizeof(V)) std::fprintf(stderr, "a vector is not aligned\n"), std::abort();
  return *(V*)address;
}

template <class T> T exchange(T value, int lane) {
  int warp = current / 32 * 32;
  std::memcpy(&threads[current].lane_value, &value, sizeof(T));
  pause(at_warp);
  T result;
  std::memset(&result, 0xff, sizeof(T));  // what a lane without a thread gives
  if (warp + lane < block_threads) std::memcpy(&result, &threads[warp + lane].lane_value, sizeof(T));
  pause(at_warp);
  return result;
}

// What the others of the warp gave: pointers to shared memory, or to what they hold themselves.
inline void give(const void* first, const void* second = nullptr) {
  threads[current].given[0] = first, threads[current].given[1] = second;
  pause(at_warp);
}
inline const void* given(int lane, int which) { return threads[current / 32 * 32 + lane].given[which]; }

struct tf32 {
  float x;
  operator float() const {  // the instruction does not read the last 13 bits
    uint bits;
    std::memcpy(&bits, &x, 4);
    bits &= ~0x1fffu;
    float cut;
    std::memcpy(&cut, &bits, 4);
    return cut;
  }
};

// mma.sync.m16n8kK with K = 32 bytes (PTX ISA, "Matrix Fragments"): thread 4 g + t holds words of rows g and g + 8.
template <class T, class Sum> void multiply(Sum* d, const void* a, const void* b, const Sum* c) {
  constexpr int word = 4 / sizeof(T), K = 8 * word;
  give(a, b);
  int lane = current % 32;
  for (int i = 0; i < 4; ++i) {
    int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    Sum sum = c[i];
    for (int k = 0; k < K; ++k) {
      int t = k % (4 * word) / word, half = k / (4 * word);
      auto left = (const T*)given(row % 8 * 4 + t, 0), right = (const T*)given(column * 4 + t, 1);
      sum += Sum(left[word * (2 * half + row / 8) + k % word]) * Sum(right[word * half + k % word]);
    }
    d[i] = sum;
  }
  pause(at_warp);
}

// wgmma of 64 rows, N columns and lines of 128 bytes (PTX ISA): this thread's sums, when they are waited for. What lies
// in shared memory must be there when it is issued, and stay there until then.
template <class T> T in_line(const T* tile, int line, int position) {
  constexpr int piece = 16 / sizeof(T);
  auto address = reinterpret_cast<uintptr_t>(tile + line * 8 * piece + position);
  if (reinterpret_cast<uintptr_t>(tile) % 1024) std::fprintf(stderr, "a tile is not aligned\n"), std::abort();
  return *reinterpret_cast<const T*>(address ^ (address >> 7 & 7) << 4);  // the 128-byte swizzle
}
template <class T, class Sum, int N, bool A_ALONG, bool B_ALONG>
void multiply_lines(Sum* d, const void* a, const void* b) {
  constexpr int line = 128 / sizeof(T), steps = line;
  auto element = [](const void* tile, int x, int k, bool along) {
    return along ? in_line((const T*)tile, x, k) : in_line((const T*)tile + x / line * line * steps, k, x % line);
  };
  int lane = current % 128;
  for (int place = 0; place < N / 2; ++place) {
    int i = lane / 32 * 16 + lane % 32 / 4 + 8 * (place / 2 % 2), j = place / 4 * 8 + lane % 4 * 2 + place % 2;
    Sum sum = d[place];
    for (int k = 0; k < steps; ++k) sum += Sum(element(a, i, k, A_ALONG)) * Sum(element(b, j, k, B_ALONG));
    d[place] = sum;
  }
}
template <class T, class Sum, int N, bool A_ALONG, bool B_ALONG>
void issue_lines(Sum* d, const void* a, const void* b) {
  std::vector<Sum> early(d, d + N / 2);
  multiply_lines<T, Sum, N, A_ALONG, B_ALONG>(early.data(), a, b);
  threads[current].products.push_back([=] {
    multiply_lines<T, Sum, N, A_ALONG, B_ALONG>(d, a, b);
    if (std::memcmp(d, early.data(), sizeof(Sum) * N / 2)) std::fprintf(stderr, "a tile changed\n"), std::abort();
  });
}

}  // namespace machine

inline void __syncthreads() { machine::pause(machine::at_block); }
inline void __syncwarp(unsigned = 0) { machine::pause(machine::at_warp); }
inline unsigned __activemask() { return 0xffffffffu; }
template <class T> T __shfl_sync(unsigned, T value, int from, int width = 32) {
  return machine::exchange(value, machine::current % 32 / width * width + from % width);
}
template <class T> T __shfl_down_sync(unsigned, T value, int by, int width = 32) {
  int lane = machine::current % 32, from = lane + by;
  return machine::exchange(value, from / width == lane / width ? from : lane);
}

// Every thread holds a whole fragment, which is what the threads of a warp hold together.
namespace nvcuda::wmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };
template <class Use, int M, int N, int K, class T, class Layout = void> struct fragment {
  static constexpr int rows = std::is_same_v<Use, matrix_b> ? K : M;
  static constexpr int columns = std::is_same_v<Use, matrix_a> ? K : N;
  T x[rows][columns];
};
template <class F, class T> void fill_fragment(F& f, T value) {
  for (auto& row : f.x) std::fill(std::begin(row), std::end(row), value);
}
template <class Use, int M, int N, int K, class T, class Layout, class P>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& f, const P* from, unsigned stride) {
  using F = fragment<Use, M, N, K, T, Layout>;
  __syncwarp();
  for (int i = 0; i < F::rows; ++i)
    for (int j = 0; j < F::columns; ++j)
      f.x[i][j] = T(from[std::is_same_v<Layout, row_major> ? i * stride + j : j * stride + i]);
}
template <class P, class F> void store_matrix_sync(P* to, const F& f, unsigned stride, layout_t) {
  __syncwarp();
  for (int i = 0; i < F::rows; ++i)
    for (int j = 0; j < F::columns; ++j) to[i * stride + j] = f.x[i][j];
}
template <class D, class A, class B, class C> void mma_sync(D& d, const A& a, const B& b, const C& c) {
  for (int i = 0; i < D::rows; ++i)
    for (int j = 0; j < D::columns; ++j) {
      auto sum = c.x[i][j];
      for (int k = 0; k < A::columns; ++k) sum += decltype(sum)(a.x[i][k]) * decltype(sum)(b.x[k][j]);
      d.x[i][j] = sum;
    }
}
}  // namespace nvcuda::wmma
#pragma GCC visibility pop
