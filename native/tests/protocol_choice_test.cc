// Which messages are timed by slots and by reading, and which way they go then.
#include "transport/shm/protocol_choice.h"

#include <utility>

#include "shm_pair.h"

namespace hetcoll::testing {
namespace {

constexpr std::size_t kKiB = 1024;

constexpr Frame Exchanged(std::size_t total) { return {1, total, true, -1, Use::kExchanged, true}; }
constexpr Frame Stored(std::size_t total) { return {2, total, true, -1, Use::kStored}; }

bool Asks(const ProtocolChoice& ways, int band) { return (ways.asked() >> band & 1) != 0; }

// A period of messages, all of which go the way that is asked for. Whether those after the trial are read.
bool Period(ProtocolChoice& ways, int band, float slots, float read) {
  const int trial = ProtocolChoice::Trial(band);
  bool first = false, last = false;
  for (int i = 0; i < ProtocolChoice::kPeriod; ++i) {
    ways.Began(band);
    const bool asked = Asks(ways, band);
    if (i == 0) first = asked;
    if (i < 2 * trial) CHECK(asked == (first ^ (i >= trial)), "message %d of a trial", i);
    if (i > 2 * trial) CHECK(asked == last, "message %d changes its way", i);
    const float lost = i % 3 == 0 ? 1000 : 1;  // time slices
    ways.Took(band, asked, (asked ? read : slots) * lost);
    last = asked;
  }
  return last;
}

}  // namespace

void Bands() {
  const std::pair<Frame, int> frames[] = {{Exchanged(16 * kKiB - 1), -1},
                                          {Exchanged(16 * kKiB), 0},
                                          {Exchanged(32 * kKiB - 1), 0},
                                          {Exchanged(32 * kKiB), 1},
                                          {Exchanged(1024 * kKiB - 1), 5},
                                          {Exchanged(1024 * kKiB), -1},
                                          {Exchanged(32 * 1024 * kKiB - 1), -1},
                                          {Exchanged(32 * 1024 * kKiB), 8},
                                          {Exchanged(std::size_t{1} << 40), 8},
                                          {Stored(64 * kKiB - 1), -1},
                                          {Stored(64 * kKiB), 6},
                                          {Stored(256 * kKiB - 1), 7},
                                          {Stored(256 * kKiB), -1},
                                          {{3, 64 * kKiB, true, -1, Use::kSummed}, -1},
                                          {{4, 64 * kKiB, true}, -1},
                                          {Exchanged(0), -1}};
  for (const auto& [m, band] : frames) {
    CHECK(ProtocolChoice::Band(m) == band, "%zu bytes: band %d, not %d", m.total, ProtocolChoice::Band(m), band);
  }
}

void Trials() {
  for (int band = 0; band < ProtocolChoice::kBands; ++band) {
    ProtocolChoice ways;
    const std::uint32_t others = ~(1U << band), first = ways.asked();
    CHECK(Period(ways, band, 2, 1), "band %d: reading takes less", band);
    CHECK(!Period(ways, band, 1, 2), "band %d: slots do since", band);
    CHECK(Period(ways, band, 1, 1) == ((first >> band & 1) != 0), "band %d: neither", band);
    CHECK((ways.asked() & others) == (first & others), "each band by itself");
    for (int i = 0; i < ProtocolChoice::kPeriod; ++i) {  // as from memory that cannot be read
      ways.Began(band);
      ways.Took(band, false, 1);
      CHECK(i < 2 * ProtocolChoice::Trial(band) || !Asks(ways, band),
            "band %d: what could not be read is not asked for", band);
    }
  }
}

// Messages arrive whichever way they go, and it is the way that was asked for.
void TimedMessages() {
  for (const Frame& m : {Exchanged(16 * kKiB), Exchanged(300 * kKiB), Stored(100 * kKiB)}) {
    Pair pair(std::size_t{2} << 20, {SlotStores::kCached, PrivateReads::kAuto, true});
    pair.segment->Introduce(0);
    const ShmCredit& credit = *reinterpret_cast<ShmCredit*>(pair.segment->edge(0, 1, 0));
    const int band = ProtocolChoice::Band(m), trial = ProtocolChoice::Trial(band);
    int lent = 0;
    for (int i = 0; i < 2 * trial + 4; ++i) {
      const Bytes data = Pattern(m.total, static_cast<unsigned>(i));
      const bool read = credit.reads == 1 && (credit.asked >> band & 1) != 0;
      CHECK(pair.a[0].send->Push(m, 0, data.data(), m.total) == std::ptrdiff_t(m.total), "message %d", i);
      CHECK((pair.a[0].send->Lent() > 0) == read, "message %d goes another way than was asked for", i);
      lent += read;
      CHECK(ReceiveAll(*pair.b[0].recv, m) == data && pair.a[0].send->Lent() == 0, "message %d", i);
      if (!m.mutual) continue;
      CHECK(pair.b[0].send->Push(m, 0, data.data(), m.total) == std::ptrdiff_t(m.total), "answer %d", i);
      CHECK(ReceiveAll(*pair.a[0].recv, m) == data, "answer %d", i);
    }
    CHECK(lent >= trial - 1 && lent <= trial + 4, "%d were read", lent);  // all but the first
  }
}

// Headers say which band it is: no other may lead astray.
void FalseBands() {
  const Frame m = Exchanged(20 * kKiB);
  const Bytes data = Pattern(m.total, 1);
  for (const int band : {-2, ProtocolChoice::kBands, 127, -128}) {
    Pair pair(std::size_t{2} << 20, {SlotStores::kCached, PrivateReads::kAuto, true});
    pair.a[0].send->Push(m, 0, data.data(), m.total);
    pair.line(0, 0).where.band = static_cast<std::int8_t>(band);
    CHECK(ReceiveAll(*pair.b[0].recv, m) == data, "band %d", band);
  }
}

}  // namespace hetcoll::testing
