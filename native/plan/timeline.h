// When the pieces of tasks are done that share servers: the clock behind predictions
// (src/hetcoll/plan/simulator/graph.py makes the tasks).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hetcoll {

// Tasks, what each occupies, and what waits for it. Of task i, these are the entries [uses_at[i], uses_at[i + 1]) and
// [then_at[i], then_at[i + 1]).
struct TaskGraph {
  std::span<const std::int32_t> pieces;  // of each task, at least 1
  std::span<const std::int64_t> uses_at;
  std::span<const std::int32_t> server;
  std::span<const double> each;   // seconds of the server for a piece
  std::span<const double> first;  // and for the first one besides
  std::span<const std::int64_t> then_at;
  std::span<const std::int32_t> then;
  std::span<const std::uint8_t> paced;  // whether each piece waits for its own; else the first for the last
  std::span<const double> delay;
  std::span<const double> slack;  // of each server: seconds of work that it does at once after as long a rest
};

struct Timeline {
  std::vector<double> begin, end;  // of each task; end is -1 where it never began
  std::vector<double> busy;        // of each server
};

// A discrete-event simulation. A piece begins when all that it waits for is done. Servers take pieces in the order in
// which these begin, ties by the tasks' numbers; a piece that occupies several passes through all of them at once, and
// is done when the last one has had it. A server with slack is a token bucket, full at the beginning. Throws
// std::invalid_argument for arrays that do not fit together.
Timeline RunTimeline(const TaskGraph& graph);

}  // namespace hetcoll
