// TCP sockets that broke and are made again, of whoever has TCP links: an engine, or a proxy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "transport/tcp_mending.h"
#include "transport/tls.h"

namespace hetcoll {

namespace nb = nanobind;

using CameTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint32_t>;

// `of` gives the owner in an object of the class.
template <class Class, class Of>
void BindMending(Class& c, Of of) {
  using namespace nb::literals;
  using Self = typename Class::Type;
  using Free = nb::call_guard<nb::gil_scoped_release>;  // whoever has the owner's lock may want the interpreter's
  c.def("mend_tcp", [of](Self& self) { return of(self).MendTcp(); })
      .def("take_lost",
           [of](Self& self) {
             std::vector<LostSocket> lost;
             {
               nb::gil_scoped_release release;
               lost = of(self).TakeLost();
             }
             nb::list out;
             for (const LostSocket& l : lost) {
               out.append(nb::make_tuple(l.id.peer, l.id.channel, l.id.stripe, l.tries, l.held, l.spoiled, l.why));
             }
             return out;
           })
      .def(
          "is_lost",
          [of](Self& self, int peer, int channel, std::uint32_t stripe) {
            return of(self).IsLost({peer, channel, stripe});
          },
          "peer"_a, "channel"_a, "stripe"_a, Free())
      .def(
          "hold_socket",
          [of](Self& self, int peer, int channel, std::uint32_t stripe, std::uint32_t number, bool first) {
            const std::optional<Came> came = of(self).HoldSocket({peer, channel, stripe}, number, first);
            return came ? std::optional(CameTuple{came->total, came->spoiled_at, came->spoiled}) : std::nullopt;
          },
          "peer"_a, "channel"_a, "stripe"_a, "number"_a, "first"_a, Free())
      .def(
          "resume_socket",
          [of](Self& self, int peer, int channel, std::uint32_t stripe, std::uint32_t number, int fd,
               const CameTuple& came) {
            const auto [total, spoiled_at, spoiled] = came;
            const bool taken = of(self).ResumeSocket({peer, channel, stripe}, number, fd, {total, spoiled_at, spoiled});
            if (!taken) static_cast<void>(Tls::Claim(fd));  // nobody else will
            return taken;
          },
          "peer"_a, "channel"_a, "stripe"_a, "number"_a, "fd"_a, "came"_a, Free())
      .def(
          "give_up_socket",
          [of](Self& self, int peer, int channel, std::uint32_t stripe, const std::string& why) {
            of(self).GiveUpSocket({peer, channel, stripe}, why);
          },
          "peer"_a, "channel"_a, "stripe"_a, "why"_a, Free())
      .def("undelivered", [of](Self& self) { return of(self).Undelivered(); }, Free());
}

}  // namespace hetcoll
