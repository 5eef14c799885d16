#include "checkpoint/format/dtype.h"

#include <algorithm>
#include <array>

namespace fsdp::internal::checkpoint {
namespace {

using c10::ScalarType;

struct DtypeNames {
  ScalarType dtype;
  const char* safetensors;  // null: not in the format
  const char* python;
};
constexpr std::array<DtypeNames, 22> kNames = {{
    {ScalarType::Double, "F64", "float64"},
    {ScalarType::Float, "F32", "float32"},
    {ScalarType::Half, "F16", "float16"},
    {ScalarType::BFloat16, "BF16", "bfloat16"},
    {ScalarType::Long, "I64", "int64"},
    {ScalarType::Int, "I32", "int32"},
    {ScalarType::Short, "I16", "int16"},
    {ScalarType::Char, "I8", "int8"},
    {ScalarType::UInt64, "U64", "uint64"},
    {ScalarType::UInt32, "U32", "uint32"},
    {ScalarType::UInt16, "U16", "uint16"},
    {ScalarType::Byte, "U8", "uint8"},
    {ScalarType::Bool, "BOOL", "bool"},
    {ScalarType::Float8_e4m3fn, "F8_E4M3", "float8_e4m3fn"},
    {ScalarType::Float8_e5m2, "F8_E5M2", "float8_e5m2"},
    {ScalarType::Float8_e4m3fnuz, "F8_E4M3FNUZ", "float8_e4m3fnuz"},
    {ScalarType::Float8_e5m2fnuz, "F8_E5M2FNUZ", "float8_e5m2fnuz"},
    {ScalarType::Float8_e8m0fnu, "F8_E8M0", "float8_e8m0fnu"},
    {ScalarType::Float4_e2m1fn_x2, nullptr, "float4_e2m1fn_x2"},
    {ScalarType::ComplexFloat, "C64", "complex64"},
    {ScalarType::ComplexDouble, nullptr, "complex128"},
    {ScalarType::ComplexHalf, nullptr, "complex32"},
}};

// The dtype of the first row that is so.
template <class IsSo>
std::optional<ScalarType> dtype_where(IsSo is_so) {
  const auto found = std::find_if(kNames.begin(), kNames.end(), is_so);
  return found == kNames.end() ? std::nullopt : std::optional<ScalarType>(found->dtype);
}

// Two values to an element.
constexpr ScalarType kPacked = ScalarType::Float4_e2m1fn_x2;

bool is_float(ScalarType dtype) { return c10::isFloatingType(dtype) && dtype != kPacked; }
bool is_half(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

bool widens_float(ScalarType from, ScalarType to) {
  const size_t before = c10::elementSize(from);
  // E8M0 has the exponents of float, which half lacks.
  if (from == ScalarType::Float8_e8m0fnu && to == ScalarType::Half) return false;
  return c10::elementSize(to) > before && (!is_half(to) || before == 1);
}

bool widens_integer(ScalarType from, ScalarType to) {
  const size_t before = c10::elementSize(from), after = c10::elementSize(to);
  const bool from_signed = c10::isSignedType(from), to_signed = c10::isSignedType(to);
  if (from_signed && !to_signed) return false;
  return after > before || (after == before && from_signed == to_signed);
}

}  // namespace

std::optional<std::string> dtype_name(ScalarType dtype) {
  const auto found = std::find_if(kNames.begin(), kNames.end(),
                                  [&](const auto& names) { return names.dtype == dtype; });
  if (found == kNames.end() || found->safetensors == nullptr) return std::nullopt;
  return found->safetensors;
}

std::optional<ScalarType> dtype_of(std::string_view name) {
  return dtype_where([&](const DtypeNames& names) {
    return names.safetensors != nullptr && name == names.safetensors;
  });
}

std::optional<int64_t> bits_of_dtype_without_tensors(std::string_view name) {
  if (name == "F4") return 4;
  if (name == "F6_E2M3" || name == "F6_E3M2") return 6;
  return std::nullopt;
}

std::optional<ScalarType> dtype_of_python_name(std::string_view name) {
  return dtype_where([&](const DtypeNames& names) { return name == names.python; });
}

std::optional<ScalarType> dtype_of_storage_class(std::string_view name) {
  constexpr std::string_view kStorage = "Storage";
  if (!name.ends_with(kStorage)) return std::nullopt;
  name.remove_suffix(kStorage.size());
  return dtype_where([&](const DtypeNames& names) { return name == c10::toString(names.dtype); });
}

bool widens_exactly(ScalarType from, ScalarType to) {
  if (from == to) return true;
  if (is_float(from) && is_float(to)) return widens_float(from, to);
  if (c10::isComplexType(from) && c10::isComplexType(to)) {
    return c10::elementSize(to) > c10::elementSize(from);
  }
  const auto plain = [](ScalarType dtype) {
    return c10::isIntegralType(dtype, /*includeBool=*/false);
  };
  if (from == ScalarType::Bool) return plain(to);
  return plain(from) && plain(to) && widens_integer(from, to);
}

}  // namespace fsdp::internal::checkpoint
