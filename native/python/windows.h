// One-sided messages of an engine: src/hetcoll/_native.pyi says what each thing here is for.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstddef>
#include <cstdint>

#include "host/windows.h"
#include "python/copies.h"
#include "python/py_engine.h"

namespace hetcoll {

namespace nb = nanobind;

inline void BindWindows(nb::class_<PyEngine>& engine) {
  using namespace nb::literals;
  using Free = nb::call_guard<nb::gil_scoped_release>;
  engine.def("serve_windows", [](PyEngine& e) { e.engine().ServeWindows(); })
      .def(
          "add_window",
          [](PyEngine& e, std::uint32_t id, std::uintptr_t address, std::size_t nbytes, std::size_t signals,
             bool device) {
            e.engine().AskWindows([&](Windows& windows) {
              windows.Add(id, reinterpret_cast<std::byte*>(address), nbytes, signals, device);
            });
          },
          "window"_a, "address"_a, "nbytes"_a, "signals"_a, "device"_a = false, Free())
      .def(
          "see_window",
          [](PyEngine& e, std::uint32_t id, int peer, std::uintptr_t address, std::size_t nbytes) {
            e.engine().AskWindows([&](Windows& windows) {
              windows.See(id, peer, {reinterpret_cast<const std::byte*>(address), nbytes});
            });
          },
          "window"_a, "peer"_a, "address"_a, "nbytes"_a, Free())
      .def(
          "window_is_seen",
          [](PyEngine& e, std::uint32_t id, int peer) {
            e.engine().AskWindows([&](Windows& windows) { windows.IsSeen(id, peer); });
          },
          "window"_a, "peer"_a, Free())
      .def(
          "use_copier",
          [](PyEngine& e, const PyCopier& copier, std::uintptr_t pinned, std::size_t nbytes) {
            e.engine().UseCopier(copier.copier, {reinterpret_cast<std::byte*>(pinned), nbytes});
          },
          "copier"_a, "pinned"_a, "nbytes"_a, Free())
      .def(
          "show_signals",
          [](PyEngine& e, std::uint32_t id, std::uintptr_t words) {
            e.engine().AskWindows([&](Windows& windows) { windows.Show(id, reinterpret_cast<std::uint64_t*>(words)); });
          },
          "window"_a, "words"_a, Free())
      .def(
          "window_settled",
          [](PyEngine& e, std::uint32_t id) {
            return e.engine().AskWindows([&](Windows& windows) { return windows.Settled(id); });
          },
          Free())
      .def(
          "place_window",
          [](PyEngine& e, std::uint32_t id, int peer) {
            e.engine().AskWindows([&](Windows& windows) { windows.Place(id, peer); });
          },
          "window"_a, "peer"_a, Free())
      .def(
          "revoke_window", [](PyEngine& e, std::uint32_t id) { e.engine().RevokeWindow(id); }, Free())
      .def(
          "close_window",
          [](PyEngine& e, std::uint32_t id) { e.engine().AskWindows([&](Windows& windows) { windows.Close(id); }); },
          Free())
      .def("transfer", &PyEngine::Transfer, "gets"_a, "window"_a, "peer"_a, "address"_a, "pieces"_a, "signal"_a,
           "device"_a = false, "after"_a = nb::none(), "own"_a = nb::none(), "late"_a = 0, "item"_a = 1)
      .def("expect",
           [](PyEngine& e, std::uint32_t id, std::size_t index, std::uint64_t value) {
             return Ticket{e.engine().AskWindows([&](Windows& windows) { return windows.Expect(id, index, value); })};
           })
      .def("signal",
           [](PyEngine& e, std::uint32_t id, std::size_t index) {
             return e.engine().AskWindows([&](Windows& windows) { return windows.Signal(id, index); });
           })
      .def("window_counts", [](PyEngine& e) {
        const WindowCounts c = e.engine().AskWindows([](Windows& windows) { return windows.counts(); });
        return nb::make_tuple(c.puts, c.gets, c.pieces, c.bytes, c.refused, c.direct);
      });
}

}  // namespace hetcoll
