// How far a lost rail is on its way back: see recovery.cc.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "transport/verbs/rail.h"
#include "transport/verbs/read_back.h"

namespace hetcoll {

struct Recovery {
  enum class Step { kIdle, kMake, kOffered, kConnect, kProbe };
  // What the peer says: where its new end is, or (not usable) that there is none.
  struct LocalNics {
    std::uint32_t attempt;
    RailAddress address;
  };
  struct Made {
    std::unique_ptr<Rail> rail;  // not proved yet
    // Where memory is GPUs': what its device used to read with may have failed with it.
    std::unique_ptr<ReadBack> read_back;
  };

  Step step = Step::kIdle;
  std::uint32_t attempt = 0;  // both ends count the same
  std::uint32_t life = 0;     // the attempt that the rail in use came of; 0: of the link's handshake
  int tries = 0;              // since it was last up for long
  std::uint64_t all_tries = 0;
  std::uint64_t successes = 0;
  std::int64_t next_ns = 0;   // no try before
  std::int64_t until_ns = 0;  // its probe has to be through
  std::int64_t up_ns = 0;     // it was taken up again
  std::optional<LocalNics> heard;
  RailAddress peer{};
  std::string why;  // the last try failed
  Made made;
  // Making and connecting one may take a device a second, for which no call can wait: a thread of its own does it.
  std::future<Made> making;
};

}  // namespace hetcoll
