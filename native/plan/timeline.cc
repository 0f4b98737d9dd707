#include "plan/timeline.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <stdexcept>

namespace hetcoll {
namespace {

void Want(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

void CheckOffsets(std::span<const std::int64_t> at, std::size_t tasks, std::size_t entries) {
  Want(at.size() == tasks + 1 && at.front() == 0 && at.back() == static_cast<std::int64_t>(entries) &&
           std::is_sorted(at.begin(), at.end()),
       "wanted rising offsets of each task's entries");
}

void Check(const TaskGraph& g) {
  const std::size_t tasks = g.pieces.size();
  CheckOffsets(g.uses_at, tasks, g.server.size());
  CheckOffsets(g.then_at, tasks, g.then.size());
  Want(g.each.size() == g.server.size() && g.first.size() == g.server.size(), "wanted a time for each use");
  Want(g.paced.size() == g.then.size() && g.delay.size() == g.then.size(), "wanted a delay for each that waits");
  const auto within = [](std::span<const std::int32_t> values, std::size_t end) {
    return std::all_of(values.begin(), values.end(),
                       [end](std::int32_t v) { return v >= 0 && static_cast<std::size_t>(v) < end; });
  };
  Want(within(g.server, g.slack.size()) && within(g.then, tasks), "there is no such server or task");
  Want(std::all_of(g.slack.begin(), g.slack.end(), [](double s) { return s >= 0; }), "wanted no slack below 0");
  Want(std::all_of(g.pieces.begin(), g.pieces.end(), [](std::int32_t n) { return n >= 1; }), "wanted pieces");
}

struct Moment {
  double when;
  std::int32_t task, piece;
  bool operator>(const Moment& other) const {
    if (when != other.when) return when > other.when;
    return task != other.task ? task > other.task : piece > other.piece;
  }
};

class Run {
 public:
  explicit Run(const TaskGraph& graph) : g_(graph), at_(graph.pieces.size() + 1, 0) {
    for (const double slack : g_.slack) free_.push_back(-slack);
    const std::size_t tasks = g_.pieces.size();
    for (std::size_t i = 0; i < tasks; ++i) at_[i + 1] = at_[i] + static_cast<std::size_t>(g_.pieces[i]);
    missing_.assign(at_.back(), 1);  // a piece waits for the one before it
    ready_.assign(at_.back(), 0.0);
    for (std::size_t i = 0; i < tasks; ++i) missing_[at_[i]] = 0;
    for (std::size_t i = 0; i < tasks; ++i) {
      for (std::int64_t k = g_.then_at[i]; k < g_.then_at[i + 1]; ++k) {
        const auto next = static_cast<std::size_t>(g_.then[k]);
        for (std::int32_t j = 0; j < (Paced(i, k) ? g_.pieces[next] : 1); ++j) ++missing_[at_[next] + j];
      }
    }
    out_.begin.assign(tasks, 0.0);
    out_.end.assign(tasks, -1.0);
    out_.busy.assign(g_.slack.size(), 0.0);
  }

  Timeline All() {
    for (std::size_t i = 0; i < g_.pieces.size(); ++i) {
      if (missing_[at_[i]] == 0) queue_.push({0.0, static_cast<std::int32_t>(i), 0});
    }
    while (!queue_.empty()) {
      const Moment event = queue_.top();
      queue_.pop();
      Finish(event, Serve(event));
    }
    return std::move(out_);
  }

 private:
  bool Paced(std::size_t task, std::int64_t k) const {
    return g_.paced[k] != 0 && g_.pieces[task] == g_.pieces[g_.then[k]];
  }

  double Serve(const Moment& event) {
    double done = event.when;
    for (std::int64_t k = g_.uses_at[event.task]; k < g_.uses_at[event.task + 1]; ++k) {
      const double work = g_.each[k] + (event.piece == 0 ? g_.first[k] : 0.0);
      double& free = free_[g_.server[k]];
      free = std::max(free, event.when - g_.slack[g_.server[k]]) + work;
      out_.busy[g_.server[k]] += work;
      done = std::max(done, free);
    }
    return done;
  }

  void Finish(const Moment& event, double done) {
    const std::size_t task = event.task;
    if (event.piece == 0) out_.begin[task] = event.when;
    const bool last = event.piece + 1 == g_.pieces[task];
    if (last) {
      out_.end[task] = done;
    } else {
      Release(event.task, event.piece + 1, done);
    }
    for (std::int64_t k = g_.then_at[task]; k < g_.then_at[task + 1]; ++k) {
      if (Paced(task, k)) {
        Release(g_.then[k], event.piece, done + g_.delay[k]);
      } else if (last) {
        Release(g_.then[k], 0, done + g_.delay[k]);
      }
    }
  }

  void Release(std::int32_t task, std::int32_t piece, double when) {
    const std::size_t i = at_[task] + piece;
    ready_[i] = std::max(ready_[i], when);
    if (--missing_[i] == 0) queue_.push({ready_[i], task, piece});
  }

  const TaskGraph& g_;
  std::vector<double> free_, ready_;
  std::vector<std::size_t> at_;
  std::vector<std::int32_t> missing_;
  std::priority_queue<Moment, std::vector<Moment>, std::greater<>> queue_;
  Timeline out_;
};

}  // namespace

Timeline RunTimeline(const TaskGraph& graph) {
  Check(graph);
  return Run(graph).All();
}

}  // namespace hetcoll
