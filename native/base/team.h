// Threads that help one other thread with what is too much for one core: the copies and reductions of a rank without a
// GPU, whose slots GPUs fill and empty faster than one core moves bytes.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace hetcoll {

class Team {
 public:
  // The threads begin with the first work.
  explicit Team(unsigned helpers) : helpers_(helpers) {}
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  unsigned helpers() const { return helpers_; }

  // Calls work(begin, end) for parts of [0, n) that begin at multiples of 4 KiB, here and on the helpers, all at once,
  // and returns when all are done. `work` must not throw. Callable from one thread at a time.
  template <class Work>
  void Share(std::size_t n, const Work& work) {
    if (n < kLeast || helpers_ == 0) {
      work(std::size_t{0}, n);
    } else {
      Run({[](const void* w, std::size_t begin, std::size_t end) { (*static_cast<const Work*>(w))(begin, end); }, &work,
           n});
    }
  }

 private:
  static constexpr std::size_t kLeast = std::size_t{64} << 10;  // less is done before the helpers know of it

  struct Job {
    void (*call)(const void* work, std::size_t begin, std::size_t end) = nullptr;
    const void* work = nullptr;
    std::size_t nbytes = 0;
  };

  void Run(const Job& job);
  void Part(unsigned number) const;
  void Help(unsigned number);

  unsigned helpers_;
  pid_t pid_ = 0;  // whose the threads are
  Job job_;
  std::atomic<std::uint32_t> turn_{0};  // grows with each job; helpers wait for it
  std::atomic<unsigned> busy_{0};       // helpers that are not done with the job
  std::atomic<bool> over_{false};
  std::vector<std::thread> threads_;
};

}  // namespace hetcoll
