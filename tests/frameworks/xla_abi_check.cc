// Our declarations of XLA's FFI structs (native/python/xla_abi.h) against its own header, which jaxlib has. Only
// compiled, by tests/frameworks/test_jax.py.

#include <xla/ffi/api/c_api.h>

#include "python/xla_abi.h"
#include "support/same_layout.h"

namespace hetcoll::xla {

static_assert(kApiMajor == XLA_FFI_API_MAJOR && kApiMinor <= XLA_FFI_API_MINOR);
static_assert(kExtensionMetadata == XLA_FFI_Extension_Metadata);
static_assert(kCancelled == XLA_FFI_Error_Code_CANCELLED);
static_assert(kFailedPrecondition == XLA_FFI_Error_Code_FAILED_PRECONDITION);
static_assert(kInternal == XLA_FFI_Error_Code_INTERNAL);
static_assert(kTypeToken == XLA_FFI_DataType_TOKEN);
static_assert(kBuffer == XLA_FFI_ArgType_BUFFER && kBuffer == XLA_FFI_RetType_BUFFER);
static_assert(kAttrString == XLA_FFI_AttrType_STRING);
static_assert(kStageExecute == XLA_FFI_ExecutionStage_EXECUTE);

SAME(Extension, XLA_FFI_Extension_Base, struct_size);
SAME(Extension, XLA_FFI_Extension_Base, type);
SAME(Extension, XLA_FFI_Extension_Base, next);
SAME_SIZE(ApiVersion, XLA_FFI_Api_Version);
SAME(ApiVersion, XLA_FFI_Api_Version, major_version);
SAME(ApiVersion, XLA_FFI_Api_Version, minor_version);
SAME(Metadata, XLA_FFI_Metadata, api_version);
SAME(Metadata, XLA_FFI_Metadata, traits);
SAME(Metadata, XLA_FFI_Metadata, state_type_id);
SAME(MetadataExtension, XLA_FFI_Metadata_Extension, metadata);
SAME_SIZE(ErrorCreateArgs, XLA_FFI_Error_Create_Args);
SAME(ErrorCreateArgs, XLA_FFI_Error_Create_Args, message);
SAME(ErrorCreateArgs, XLA_FFI_Error_Create_Args, errc);
SAME_SIZE(StreamGetArgs, XLA_FFI_Stream_Get_Args);
SAME(StreamGetArgs, XLA_FFI_Stream_Get_Args, ctx);
SAME(StreamGetArgs, XLA_FFI_Stream_Get_Args, stream);
SAME_SIZE(DeviceOrdinalGetArgs, XLA_FFI_DeviceOrdinal_Get_Args);
SAME(DeviceOrdinalGetArgs, XLA_FFI_DeviceOrdinal_Get_Args, ctx);
SAME(DeviceOrdinalGetArgs, XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal);
SAME(Api, XLA_FFI_Api, struct_size);
SAME(Api, XLA_FFI_Api, api_version);
SAME_PLACE(Api, error_create, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME_PLACE(Api, stream_get, XLA_FFI_Api, XLA_FFI_Stream_Get);
SAME_PLACE(Api, device_ordinal_get, XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);
SAME_SIZE(Buffer, XLA_FFI_Buffer);
SAME(Buffer, XLA_FFI_Buffer, dtype);
SAME(Buffer, XLA_FFI_Buffer, data);
SAME(Buffer, XLA_FFI_Buffer, rank);
SAME(Buffer, XLA_FFI_Buffer, dims);
SAME_SIZE(Values, XLA_FFI_Args);
SAME(Values, XLA_FFI_Args, size);
SAME(Values, XLA_FFI_Args, types);
SAME_PLACE(Values, values, XLA_FFI_Args, args);
SAME_SIZE(Values, XLA_FFI_Rets);
SAME(Values, XLA_FFI_Rets, size);
SAME(Values, XLA_FFI_Rets, types);
SAME_PLACE(Values, values, XLA_FFI_Rets, rets);
SAME_SIZE(ByteSpan, XLA_FFI_ByteSpan);
SAME(ByteSpan, XLA_FFI_ByteSpan, ptr);
SAME(ByteSpan, XLA_FFI_ByteSpan, len);
SAME_SIZE(Attrs, XLA_FFI_Attrs);
SAME(Attrs, XLA_FFI_Attrs, size);
SAME(Attrs, XLA_FFI_Attrs, types);
SAME(Attrs, XLA_FFI_Attrs, names);
SAME(Attrs, XLA_FFI_Attrs, attrs);
SAME_SIZE(CallFrame, XLA_FFI_CallFrame);
SAME(CallFrame, XLA_FFI_CallFrame, extension_start);
SAME(CallFrame, XLA_FFI_CallFrame, api);
SAME(CallFrame, XLA_FFI_CallFrame, ctx);
SAME(CallFrame, XLA_FFI_CallFrame, stage);
SAME(CallFrame, XLA_FFI_CallFrame, args);
SAME(CallFrame, XLA_FFI_CallFrame, rets);
SAME(CallFrame, XLA_FFI_CallFrame, attrs);

}  // namespace hetcoll::xla
