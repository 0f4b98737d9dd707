// A GPU's copies for one-sided messages, on streams of their own, and what these have to do with streams of users.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/copier.h"
#include "gpu/driver.h"

namespace hetcoll {

// Rows in pinned memory that kernels read. They are taken in a circle, and free again when their launch has ended.
class MoveTable {
 public:
  void Use(std::span<Move> rows);
  // Writes moves down, long ones in several rows, as many as there is room for now. The rows, and how many moves.
  std::pair<std::span<const Move>, std::size_t> Add(std::span<const Move> moves);
  // What was added so far has been launched before this mark.
  void Mark(std::uint64_t mark);
  void Pass(std::uint64_t mark);

 private:
  std::span<Move> rows_;
  std::size_t next_ = 0;
  std::size_t free_ = 0;
  std::size_t unmarked_ = 0;                                  // rows that are taken
  std::deque<std::pair<std::uint64_t, std::size_t>> marked_;  // the others of these, by mark
};

class DeviceCopier final : public Copier {
 public:
  // `streams`, by Way, are nobody else's: nothing on them waits.
  DeviceCopier(std::shared_ptr<Driver> driver, const std::array<DeviceStream, 2>& streams);

  void Copy(Way way, void* dst, const void* src, std::size_t n) override;
  void CopyEach(Way way, std::span<const Move> moves) override;
  std::uint64_t Mark(Way way) override;
  bool Passed(Way way, std::uint64_t mark) override;

  // From now on these kernels (devices/kernels/pieces.h) make the shorter ones of CopyEach: one that takes a few, and
  // one that reads a table of them, for which there is this pinned memory.
  void UseKernels(DeviceFunction few, DeviceFunction many, std::span<Move> table);

  // For any thread, beside the above. What is on `user` now, or nothing where that is done; a Fault where `user` is
  // captured into a graph, which would not do it again.
  Gate After(DeviceStream user);
  // What comes on `user` from now on waits until this word of pinned memory holds `value` or more; when it does not any
  // more.
  Gate Wait(std::uint64_t* word, std::uint64_t value, DeviceStream user);
  // What the device has failed with, or nothing.
  std::string Failure();

 private:
  struct Line {
    DeviceStream stream;
    std::deque<std::pair<std::uint64_t, Event>> under_way;
    std::vector<Event> spare;
    std::uint64_t marks = 0;
    std::uint64_t passed = 0;
    bool begun = false;  // something, since the last mark
  };
  Line& LineOf(Way way) { return lines_[static_cast<std::size_t>(way)]; }
  void LaunchFew(std::span<const Move> moves, DeviceStream stream);
  void LaunchMany(std::span<const Move> rows, DeviceStream stream);
  void CheckFree(DeviceStream user);
  Gate Recorded(DeviceStream user);
  std::unique_ptr<Event> SpareEvent();

  std::shared_ptr<Driver> driver_;
  std::atomic<bool> kernels_ = false;  // there are
  DeviceFunction few_ = nullptr;
  DeviceFunction many_ = nullptr;
  MoveTable table_;
  std::vector<Move> short_;  // of one CopyEach
  std::array<Line, 2> lines_;
  std::mutex spare_mutex_;
  std::vector<std::unique_ptr<Event>> spare_;  // for Recorded
};

}  // namespace hetcoll
