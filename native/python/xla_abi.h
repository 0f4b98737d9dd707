// The part of XLA's FFI binary interface that we use, declared here so that no header of XLA is needed to build.
//
// The layouts are those of <xla/ffi/api/c_api.h>, FFI API version 0.3, which jaxlib ships from 0.10 on;
// tests/frameworks/xla_abi_check.cc compares them where that header is installed. Structs carry their own sizes, which
// xla.cc compares before it reads them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetcoll::xla {

constexpr int kApiMajor = 0;
constexpr int kApiMinor = 3;

struct Error;
struct ExecutionContext;

struct Extension {
  std::size_t struct_size;
  int type;
  Extension* next;
};

constexpr int kExtensionMetadata = 1;

struct ApiVersion {
  std::size_t struct_size;
  Extension* extension_start;
  int major_version;
  int minor_version;
};

// What XLA asks a handler for when it is registered.
struct Metadata {
  std::size_t struct_size;
  ApiVersion api_version;
  std::uint32_t traits;
  std::int64_t state_type_id;
};

struct MetadataExtension {
  Extension extension_base;
  Metadata* metadata;
};

// Of absl::StatusCode.
constexpr int kCancelled = 1;
constexpr int kFailedPrecondition = 9;
constexpr int kInternal = 13;

struct ErrorCreateArgs {
  std::size_t struct_size;
  Extension* extension_start;
  const char* message;
  int errc;
};

struct StreamGetArgs {
  std::size_t struct_size;
  Extension* extension_start;
  ExecutionContext* ctx;
  void* stream;  // out
};

struct DeviceOrdinalGetArgs {
  std::size_t struct_size;
  Extension* extension_start;
  ExecutionContext* ctx;
  std::int32_t device_ordinal;  // out
};

struct Api {
  std::size_t struct_size;
  Extension* extension_start;
  ApiVersion api_version;
  const void* internal_api;
  Error* (*error_create)(ErrorCreateArgs*);
  void* before_stream_get[3];
  Error* (*stream_get)(StreamGetArgs*);
  void* before_device_ordinal_get[12];
  Error* (*device_ordinal_get)(DeviceOrdinalGetArgs*);
};

constexpr int kTypeToken = 17;

// Row-major.
struct Buffer {
  std::size_t struct_size;
  Extension* extension_start;
  int dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};

constexpr int kBuffer = 1;

// Arguments, and results alike.
struct Values {
  std::size_t struct_size;
  Extension* extension_start;
  std::int64_t size;
  int* types;
  void** values;
};

struct ByteSpan {
  const char* ptr;
  std::size_t len;
};

constexpr int kAttrString = 4;

// Sorted by name.
struct Attrs {
  std::size_t struct_size;
  Extension* extension_start;
  std::int64_t size;
  int* types;
  ByteSpan** names;
  void** attrs;
};

constexpr int kStageExecute = 3;

struct CallFrame {
  std::size_t struct_size;
  Extension* extension_start;
  const Api* api;
  ExecutionContext* ctx;
  int stage;
  Values args;
  Values rets;
  Attrs attrs;
  void* future;
};

}  // namespace hetcoll::xla
