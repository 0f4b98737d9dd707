// When links are to copy what a task has lent them.
#include <algorithm>

#include "host/task.h"

namespace hetcoll {

// Whether a step that this one waits for has gone further than what its link has given back.
bool Task::WaitsForLent(const BoundStep& s) const {
  return std::any_of(bound_.deps.begin() + s.dep_begin, bound_.deps.begin() + s.dep_end, [&](const BoundDep& dep) {
    const BoundStep& on = steps_[dep.step];
    return on.op == Op::kSend && !on.complete && on.done < on.posted && !(dep.in_place_only && apart_);
  });
}

// Nothing moves. Where only what was lent keeps a step from moving, or the task from its end, the links are to copy it.
// While a peer is awaited all the same they need not: most often the peer has it all before it answers.
bool Task::TakeBack(Links& links) {
  bool needed = false;
  bool awaits = false;
  for (std::size_t lane = 0; lane + 1 < bound_.lane_begin.size(); ++lane) {
    if (heads_[lane] == bound_.lane_begin[lane + 1]) continue;
    const BoundStep& s = steps_[bound_.order[heads_[lane]]];
    const bool handed = s.op == Op::kSend && s.posted == (s.wire > 0 ? s.wire : s.len);
    if (handed) {
      needed |= std::any_of(bound_.order.begin() + heads_[lane] + 1, bound_.order.begin() + bound_.lane_begin[lane + 1],
                            [&](std::uint32_t i) { return steps_[i].op != Op::kSend || steps_[i].posted == 0; });
    } else if (Ready(s)) {
      awaits = true;
    } else {
      needed |= WaitsForLent(s);
    }
  }
  if (awaits && !needed) return false;
  lends_ = false;
  bool back = false;
  for (const BoundStep& s : steps_) {
    if (s.op == Op::kSend && !s.complete && s.posted > 0) back |= links.tx(s.peer, s.channel).end->Keep();
  }
  return back;
}

}  // namespace hetcoll
