// The fake driver, compiler and collectives by their C functions, from several threads at once: for the
// sanitizers. Ends with status 0 and one line when all went as it should.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

using Address = unsigned long long;
struct UniqueId {
  char bytes[128];
};

extern "C" {
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void**, int);
int cuCtxSetCurrent(void*);
int cuMemAlloc_v2(Address*, std::size_t);
int cuMemFree_v2(Address);
int cuMemHostAlloc(void**, std::size_t, unsigned);
int cuMemFreeHost(void*);
int cuMemcpyAsync(Address, Address, std::size_t, void*);
int cuMemsetD8Async(Address, unsigned char, std::size_t, void*);
int cuStreamCreate(void**, unsigned);
int cuStreamDestroy_v2(void*);
int cuStreamSynchronize(void*);
int cuStreamWaitEvent(void*, void*, unsigned);
int cuStreamWaitValue64_v2(void*, Address, std::uint64_t, unsigned);
int cuStreamWriteValue64_v2(void*, Address, std::uint64_t, unsigned);
int cuLaunchHostFunc(void*, void (*)(void*), void*);
int cuEventCreate(void**, unsigned);
int cuEventRecord(void*, void*);
int cuEventQuery(void*);
int cuEventDestroy_v2(void*);
int cuStreamBeginCapture_v2(void*, int);
int cuStreamEndCapture(void*, void**);
int cuGraphInstantiateWithFlags(void**, void*, unsigned long long);
int cuGraphLaunch(void*, void*);
int cuGraphExecDestroy(void*);
int cuGraphDestroy(void*);
int cuModuleLoadData(void**, const void*);
int cuModuleGetFunction(void**, void*, const char*);
int cuModuleUnload(void*);
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
int nvrtcCreateProgram(void**, const char*, const char*, int, const char* const*, const char* const*);
int nvrtcCompileProgram(void*, int, const char* const*);
int nvrtcGetCUBINSize(void*, std::size_t*);
int nvrtcGetCUBIN(void*, char*);
int nvrtcDestroyProgram(void**);
int ncclGetUniqueId(UniqueId*);
int ncclCommInitRank(void**, int, UniqueId, int);
int ncclCommDestroy(void*);
int ncclAllReduce(const void*, void*, std::size_t, int, int, void*, void*);
int ncclSend(const void*, std::size_t, int, int, void*, void*);
int ncclRecv(void*, std::size_t, int, int, void*, void*);
int ncclGroupStart();
int ncclGroupEnd();
}

namespace {

constexpr int kThreads = 3, kRounds = 20;
constexpr std::size_t kCount = 3000;

void check(int code, const char* what, int line) {
  if (code == 0) return;
  std::printf("line %d: %s: %d\n", line, what, code);
  std::exit(1);
}
#define CHECK(call) check(call, #call, __LINE__)
#define TRUE(condition) check(!(condition), #condition, __LINE__)

const char* const kSource = R"(
extern "C" __global__ void add(float* to, const float* from, unsigned count) {
  __shared__ float part[64];
  for (unsigned base = 0; base < count; base += blockDim.x) {
    unsigned i = base + threadIdx.x;
    if (i < count) part[threadIdx.x] = from[i];
    __syncthreads();
    if (i < count) to[i] += part[threadIdx.x];
    __syncthreads();
  }
})";

std::string compile() {
  void* program = nullptr;
  CHECK(nvrtcCreateProgram(&program, kSource, "test.cu", 0, nullptr, nullptr));
  const char* options[] = {"--gpu-architecture=sm_90", "-std=c++17"};
  CHECK(nvrtcCompileProgram(program, 2, options));
  std::size_t nbytes = 0;
  CHECK(nvrtcGetCUBINSize(program, &nbytes));
  std::string image(nbytes, 0);
  CHECK(nvrtcGetCUBIN(program, image.data()));
  CHECK(nvrtcDestroyProgram(&program));
  return image;
}

// What one thread does with its device: kernels, copies and fills on two streams that wait for each other's events and
// values, a host function, a graph, all again and again.
class User {
 public:
  User(int device, const std::string& image) {
    void* context = nullptr;
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module_, image.data()));
    CHECK(cuModuleGetFunction(&add_, module_, "add"));
    for (void*& stream : streams_) CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuEventCreate(&event_, 2));
    CHECK(cuMemAlloc_v2(&a_, kCount * 4));
    CHECK(cuMemAlloc_v2(&b_, kCount * 4));
    CHECK(cuMemHostAlloc(&host_, kCount * 4 + 64, 3));
    std::memset(host_, 0, kCount * 4 + 64);
  }

  ~User() {
    CHECK(cuMemFreeHost(host_));
    CHECK(cuMemFree_v2(a_));
    CHECK(cuMemFree_v2(b_));
    CHECK(cuEventDestroy_v2(event_));
    for (void* stream : streams_) CHECK(cuStreamDestroy_v2(stream));
    CHECK(cuModuleUnload(module_));
  }

  void round(int number) {
    auto word = reinterpret_cast<Address>(host_) + kCount * 4;
    CHECK(cuMemsetD8Async(a_, 0, kCount * 4, streams_[0]));
    CHECK(cuMemsetD8Async(b_, 0, kCount * 4, streams_[1]));
    CHECK(cuStreamWriteValue64_v2(streams_[1], word, static_cast<std::uint64_t>(number), 0));
    CHECK(cuStreamWaitValue64_v2(streams_[0], word, static_cast<std::uint64_t>(number), 0));
    CHECK(cuLaunchHostFunc(streams_[0], [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); }, &calls_));
    std::vector<float> ones(kCount, 1.0f);
    CHECK(cuMemcpyAsync(b_, reinterpret_cast<Address>(ones.data()), kCount * 4, streams_[0]));
    CHECK(cuEventRecord(event_, streams_[0]));
    CHECK(cuStreamWaitEvent(streams_[1], event_, 0));
    launch(streams_[1]);
    CHECK(cuMemcpyAsync(reinterpret_cast<Address>(host_), a_, kCount * 4, streams_[1]));
    CHECK(cuStreamSynchronize(streams_[1]));
    TRUE(cuEventQuery(event_) == 0);
    TRUE(static_cast<float*>(host_)[kCount - 1] == 1.0f);
    TRUE(calls_ == number);
  }

  void replay() {
    void *graph = nullptr, *executable = nullptr;
    CHECK(cuStreamBeginCapture_v2(streams_[0], 2));
    launch(streams_[0]);
    CHECK(cuStreamEndCapture(streams_[0], &graph));
    CHECK(cuGraphInstantiateWithFlags(&executable, graph, 0));
    for (int i = 0; i < 3; ++i) CHECK(cuGraphLaunch(executable, streams_[0]));
    CHECK(cuMemcpyAsync(reinterpret_cast<Address>(host_), a_, kCount * 4, streams_[0]));
    CHECK(cuStreamSynchronize(streams_[0]));
    TRUE(static_cast<float*>(host_)[0] == 4.0f);
    CHECK(cuGraphExecDestroy(executable));
    CHECK(cuGraphDestroy(graph));
  }

  void collectives(const UniqueId& id, int rank) {
    void* comm = nullptr;
    CHECK(ncclCommInitRank(&comm, kThreads, id, rank));
    auto *a = reinterpret_cast<void*>(a_), *b = reinterpret_cast<void*>(b_);
    for (int i = 0; i < 5; ++i) {
      CHECK(ncclAllReduce(a, a, kCount, 7, 2, comm, streams_[i % 2]));
      CHECK(ncclGroupStart());
      CHECK(ncclSend(a, kCount, 7, (rank + 1) % kThreads, comm, streams_[0]));
      CHECK(ncclRecv(b, kCount, 7, (rank + kThreads - 1) % kThreads, comm, streams_[0]));
      CHECK(ncclGroupEnd());
    }
    for (void* stream : streams_) CHECK(cuStreamSynchronize(stream));
    CHECK(ncclCommDestroy(comm));
  }

 private:
  void launch(void* stream) {
    unsigned count = kCount;
    void* parameters[] = {&a_, &b_, &count};
    CHECK(cuLaunchKernel(add_, 1, 1, 1, 64, 1, 1, 0, stream, parameters, nullptr));
  }

  void *module_ = nullptr, *add_ = nullptr, *event_ = nullptr, *host_ = nullptr;
  void* streams_[2] = {};
  Address a_ = 0, b_ = 0;
  std::atomic<int> calls_{0};
};

}  // namespace

int main() {
  CHECK(cuInit(0));
  std::string image = compile();
  UniqueId id;
  CHECK(ncclGetUniqueId(&id));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kThreads; ++rank) {
    threads.emplace_back([&, rank] {
      User user(rank, image);
      for (int i = 1; i <= kRounds; ++i) user.round(i);
      user.replay();
      user.collectives(id, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::puts("the fakes passed");
}
