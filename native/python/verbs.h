// NICs and registered memory of whoever has RDMA links: an engine, or a proxy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host/engine.h"
#include "proxy/proxy.h"

namespace hetcoll {

namespace nb = nanobind;

using VerbsCounters = std::vector<std::pair<std::string, std::uint64_t>>;

inline std::string LinksOf(Engine& e) {
  return e.AskVerbs([](VerbsHost& verbs) { return verbs.Describe(); }, std::string("[]"));
}
inline VerbsCounters CountersOf(Engine& e) {
  return e.AskVerbs([](VerbsHost& verbs) { return verbs.Counters(); }, VerbsCounters{});
}
inline std::vector<std::string> EventsOf(Engine& e) {
  return e.AskVerbs([](VerbsHost& verbs) { return verbs.TakeEvents(); }, std::vector<std::string>{});
}
inline std::string LinksOf(Proxy& r) { return r.DescribeLinks(); }
inline VerbsCounters CountersOf(Proxy& r) { return r.Counters(); }
inline std::vector<std::string> EventsOf(Proxy& r) { return r.TakeEvents(); }

template <class Owner>
int AddNic(Owner& owner, std::uintptr_t pd, int port, int gid_index, const nb::bytes& gid, int lid, std::uint32_t mtu,
           bool ethernet, const std::string& device, int traffic_class, int service_level, int timeout, int retries,
           int rnr_retries, double gbps) {
  std::string why;
  const VerbsApi* api = SystemVerbs(why);
  if (api == nullptr) throw Fault(FaultKind::kSystem, -1, why);
  if (gid.size() != 16) throw nb::value_error("a GID of 16 bytes was wanted");
  NicInfo info;
  info.device = device;
  info.pd = reinterpret_cast<ibv::Pd*>(pd);
  info.port = static_cast<std::uint8_t>(port);
  info.gid_index = static_cast<std::uint8_t>(gid_index);
  std::copy_n(reinterpret_cast<const std::uint8_t*>(gid.c_str()), 16, info.gid.begin());
  info.lid = static_cast<std::uint16_t>(lid);
  info.mtu = mtu;
  info.ethernet = ethernet;
  info.traffic_class = static_cast<std::uint8_t>(traffic_class);
  info.service_level = static_cast<std::uint8_t>(service_level);
  info.timeout = static_cast<std::uint8_t>(timeout);
  info.retries = static_cast<std::uint8_t>(retries);
  info.rnr_retries = static_cast<std::uint8_t>(rnr_retries);
  if (gbps > 0) info.gbps = gbps;
  return owner.AddNic(std::move(info), *api);
}

// `of` gives the owner in an object of the class.
template <class Class, class Of>
void BindVerbs(Class& c, Of of) {
  using namespace nb::literals;
  using Self = typename Class::Type;
  c.def(
       "add_nic",
       [of](Self& self, std::uintptr_t pd, int port, int gid_index, const nb::bytes& gid, int lid, std::uint32_t mtu,
            bool ethernet, const std::string& device, int traffic_class, int service_level, int timeout, int retries,
            int rnr_retries, double gbps) {
         return AddNic(of(self), pd, port, gid_index, gid, lid, mtu, ethernet, device, traffic_class, service_level,
                       timeout, retries, rnr_retries, gbps);
       },
       nb::kw_only(), "pd"_a, "port"_a, "gid_index"_a, "gid"_a, "lid"_a, "mtu"_a, "ethernet"_a, "device"_a,
       "traffic_class"_a, "service_level"_a, "timeout"_a, "retries"_a, "rnr_retries"_a, "gbps"_a)
      .def(
          "register_memory",  // keys are (NIC, local key, remote key)
          [of](Self& self, std::uintptr_t address, std::size_t nbytes,
               const std::vector<std::tuple<int, std::uint32_t, std::uint32_t>>& keys,
               std::optional<std::uintptr_t> seen_at) {
            std::vector<RegionKey> list;
            for (const auto& [nic, lkey, rkey] : keys) list.push_back({nic, lkey, rkey});
            return of(self).RegisterMemory(address, nbytes, list, seen_at);
          },
          "address"_a, "nbytes"_a, "keys"_a, "seen_at"_a = nb::none())
      .def("unregister_memory", [of](Self& self, int handle) { return of(self).UnregisterMemory(handle); })
      .def("links", [of](Self& self) { return LinksOf(of(self)); })
      .def("counters",
           [of](Self& self) {
             nb::dict out;
             for (const auto& [name, value] : CountersOf(of(self))) out[name.c_str()] = value;
             const IntegrityCounts& integrity = of(self).integrity();
             out["checked_bytes"] = integrity.checked_bytes.get();
             out["spoiled_pieces"] = integrity.spoiled.get();
             out["resent_pieces"] = integrity.resent.get();
             if constexpr (requires { of(self).Copied(); }) {
               const Copies copies = of(self).Copied();
               out["shm_staged_bytes"] = copies.staged;
               out["shm_lent_bytes"] = copies.lent;
               out["shm_copied_bytes"] = copies.taken;
             }
             out["tcp_reconnects"] = of(self).reconnects();
             return out;
           })
      .def("events", [of](Self& self) { return EventsOf(of(self)); });
}

}  // namespace hetcoll
