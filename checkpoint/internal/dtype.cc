#include "checkpoint/internal/dtype.h"

#include <algorithm>
#include <array>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

using c10::ScalarType;

constexpr std::array<std::pair<const char*, ScalarType>, 15> kNames = {{
    {"F64", ScalarType::Double},
    {"F32", ScalarType::Float},
    {"F16", ScalarType::Half},
    {"BF16", ScalarType::BFloat16},
    {"I64", ScalarType::Long},
    {"I32", ScalarType::Int},
    {"I16", ScalarType::Short},
    {"I8", ScalarType::Char},
    {"U64", ScalarType::UInt64},
    {"U32", ScalarType::UInt32},
    {"U16", ScalarType::UInt16},
    {"U8", ScalarType::Byte},
    {"BOOL", ScalarType::Bool},
    {"F8_E4M3", ScalarType::Float8_e4m3fn},
    {"F8_E5M2", ScalarType::Float8_e5m2},
}};
constexpr const char* kComplexName = "C64";

bool is_float(ScalarType dtype) { return c10::isFloatingType(dtype); }
bool is_half(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

bool widens_integer(ScalarType from, ScalarType to) {
  const size_t before = c10::elementSize(from), after = c10::elementSize(to);
  const bool from_signed = c10::isSignedType(from), to_signed = c10::isSignedType(to);
  if (from_signed && !to_signed) return false;
  return after > before || (after == before && from_signed == to_signed);
}

}  // namespace

std::optional<std::string> dtype_name(ScalarType dtype) {
  if (dtype == ScalarType::ComplexFloat) return kComplexName;
  const auto found = std::find_if(kNames.begin(), kNames.end(),
                                  [&](const auto& entry) { return entry.second == dtype; });
  return found == kNames.end() ? std::nullopt : std::optional<std::string>(found->first);
}

std::optional<ScalarType> dtype_of(std::string_view name) {
  if (name == kComplexName) return ScalarType::ComplexFloat;
  const auto found = std::find_if(kNames.begin(), kNames.end(),
                                  [&](const auto& entry) { return entry.first == name; });
  return found == kNames.end() ? std::nullopt : std::optional<ScalarType>(found->second);
}

bool widens_exactly(ScalarType from, ScalarType to) {
  if (from == to) return true;
  if (is_float(from) && is_float(to)) {
    return c10::elementSize(to) > c10::elementSize(from) &&
           (!is_half(to) || from == ScalarType::Float8_e4m3fn || from == ScalarType::Float8_e5m2);
  }
  const auto plain = [](ScalarType dtype) {
    return c10::isIntegralType(dtype, /*includeBool=*/false);
  };
  if (from == ScalarType::Bool) return plain(to);
  return plain(from) && plain(to) && widens_integer(from, to);
}

}  // namespace fsdp::internal::checkpoint
