// Through slots, or read where it lies: of messages of middle length, and of those that no cache holds, neither is
// always faster. What its sender has written since it was last read is in that core's cache, from where the kernel's
// copy fetches it more slowly than ours does; what nobody has written is in the reader's cache already. The program
// decides which it is, and nobody is told. So the receiving end of an edge times both now and then, and asks its sender
// for the faster one.
//
// In an exchange a way takes longer where the other direction goes the other way. So the number of messages says when
// which one is timed, and both ends, which have had as many, do it at once.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "transport/transport.h"

namespace hetcoll {

class ProtocolChoice {
 public:
  // Bands of messages: octaves of an exchange, from the first of these on two octaves of what goes one way, and
  // exchanges that no cache holds.
  static constexpr int kOneWay = 6, kLong = 8, kBands = 9;
  static constexpr std::size_t kLeast = 16 << 10;
  static constexpr std::size_t kUncached = 32 << 20;
  static constexpr int kPeriod = 4096;  // messages of a band from trial to trial

  // Messages of a trial of one way. The first ones find the caches as the other way left them: what goes one way uses
  // all of a ring, an exchange a few slots.
  static constexpr int Trial(int band) { return Settling(band) + Samples(band); }

  // The band of a message, or -1 where one way is always taken: exchanges of 16 KiB to 1 MiB and from 32 MiB on, others
  // of 64 to 256 KiB.
  static constexpr int Band(const Message& m) {
    const int octave = std::bit_width(m.total / kLeast) - 1;
    if (m.use == Use::kExchanged) return octave < kOneWay ? octave : m.total < kUncached ? -1 : kLong;
    return m.use == Use::kStored && (octave == 2 || octave == 3) ? kOneWay + octave - 2 : -1;
  }

  // Whether what is copied into slots is copied out of them meanwhile. Of short exchanges an end copies in all that it
  // sends, and then out what it gets.
  static constexpr bool Streams(int band) { return band >= kOneWay; }

  // A message of the band begins to come.
  void Began(int band);
  // It has come in this way, and took so long for each byte.
  void Took(int band, bool read, float cost);
  // The bands of which messages should be read, a bit each.
  std::uint32_t asked() const { return asked_; }

 private:
  static constexpr int kMostSamples = 16;
  static constexpr int Samples(int band) { return band < kLong ? kMostSamples : 3; }
  static constexpr int Settling(int band) { return band < kOneWay ? 8 : band < kLong ? 32 : 1; }

  struct State {
    float Median();  // of the costs; infinity where there are none

    int messages = -1;  // of this period
    float first = 0;    // what the way that was tried first costs: the median, as a lost time slice must not count
    std::array<float, kMostSamples> costs;  // of the way that is tried
    std::size_t n = 0;
  };

  std::array<State, kBands> states_;
  static constexpr std::uint32_t kFirst = 0b111100;  // what is asked for in a period's first trial: 64 KiB to 1 MiB
  std::uint32_t asked_ = kFirst;
};

}  // namespace hetcoll
