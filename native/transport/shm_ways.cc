#include "transport/shm_ways.h"

#include <limits>

namespace hetcoll {

void Ways::Began(int band) {
  State& state = states_[static_cast<std::size_t>(band)];
  state.messages = (state.messages + 1) % kPeriod;
  if (state.messages == 0) {
    Ask(band, false);
    state.n = 0;
  } else if (state.messages == kTrial) {
    state.slots = state.Median();
    Ask(band, true);
    state.n = 0;
  } else if (state.messages == 2 * kTrial) {
    Ask(band, state.Median() < state.slots);
  }
}

void Ways::Took(int band, bool read, float cost) {
  State& state = states_[static_cast<std::size_t>(band)];
  const int since = state.messages - (read ? kTrial : 0);
  if (since >= kSettling && since < kTrial) state.costs[state.n++] = cost;
}

float Ways::State::Median() {
  if (n == 0) return std::numeric_limits<float>::infinity();
  const auto middle = costs.begin() + static_cast<std::ptrdiff_t>(n / 2);
  std::nth_element(costs.begin(), middle, costs.begin() + static_cast<std::ptrdiff_t>(n));
  return *middle;
}

void Ways::Ask(int band, bool read) {
  const std::uint32_t bit = 1U << band;
  asked_ = read ? asked_ | bit : asked_ & ~bit;
}

}  // namespace hetcoll
