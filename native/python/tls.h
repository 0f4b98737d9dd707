// An encrypted connection, for the sockets of Python's: what goes over it before an engine or a proxy takes it over.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "transport/tls.h"

namespace hetcoll {

namespace nb = nanobind;

// A pointer of its own: the last owner, an engine, may let go of it where it must not wait for the interpreter.
struct PyTls {
  std::shared_ptr<Tls> tls;
};

inline ssize_t OrOsError(ssize_t n) {
  if (n >= 0) return n;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

inline void BindTls(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<PyTls>(m, "Tls")
      .def(
          "__init__",
          [](PyTls* self, int fd, const nb::bytes& secret, bool server) {
            TlsKey key{};
            if (secret.size() != key.size()) throw nb::value_error("a key has 32 bytes");
            std::memcpy(key.data(), secret.c_str(), key.size());
            new (self) PyTls{std::make_shared<Tls>(fd, key, server, false)};
          },
          "fd"_a, "key"_a, "server"_a)
      .def("send",
           [](PyTls& self, nb::handle data) {
             Py_buffer view;
             if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
             const iovec piece{view.buf, static_cast<std::size_t>(view.len)};
             const ssize_t sent = self.tls->Send({&piece, 1});
             const int why = errno;
             PyBuffer_Release(&view);
             errno = why;
             return OrOsError(sent);
           })
      .def("recv",
           [](PyTls& self, std::size_t n) {
             const auto bytes = std::make_unique_for_overwrite<std::byte[]>(std::min(n, Tls::kRecord));
             const ssize_t got = OrOsError(self.tls->Receive(bytes.get(), std::min(n, Tls::kRecord)));
             return nb::bytes(reinterpret_cast<const char*>(bytes.get()), static_cast<std::size_t>(got));
           })
      .def("hand", [](const PyTls& self, int fd) { Tls::Hand(fd, self.tls); });
  m.def("tls_library", &Tls::Library);
}

}  // namespace hetcoll
