#include "transport/shm/protocol_choice.h"

#include <limits>

namespace hetcoll {

void ProtocolChoice::Began(int band) {
  State& state = states_[static_cast<std::size_t>(band)];
  const std::uint32_t bit = 1U << band;
  state.messages = (state.messages + 1) % kPeriod;
  if (state.messages == 0) {
    asked_ = (asked_ & ~bit) | (kFirst & bit);
    state.n = 0;
  } else if (state.messages == Trial(band)) {
    state.first = state.Median();
    state.n = 0;
    asked_ ^= bit;
  } else if (state.messages == 2 * Trial(band) && state.first <= state.Median()) {
    asked_ ^= bit;
  }
}

void ProtocolChoice::Took(int band, bool read, float cost) {
  State& state = states_[static_cast<std::size_t>(band)];
  if (read != ((asked_ >> band & 1) != 0) || state.messages >= 2 * Trial(band)) return;
  if (state.messages % Trial(band) >= Settling(band)) state.costs[state.n++] = cost;
}

float ProtocolChoice::State::Median() {
  if (n == 0) return std::numeric_limits<float>::infinity();
  const auto middle = costs.begin() + static_cast<std::ptrdiff_t>(n / 2);
  std::nth_element(costs.begin(), middle, costs.begin() + static_cast<std::ptrdiff_t>(n));
  return *middle;
}

}  // namespace hetcoll
