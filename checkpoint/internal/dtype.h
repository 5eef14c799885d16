// The names that safetensors gives dtypes, and which conversions between them lose
// nothing.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

namespace fsdp::internal::checkpoint {

// "F32" for float; nullopt for a dtype that the format does not have.
std::optional<std::string> dtype_name(c10::ScalarType dtype);
std::optional<c10::ScalarType> dtype_of(std::string_view name);

// Every value of `from` is a value of `to`: bf16 -> f32 -> f64, i8 -> i64, and equal
// ones.
bool widens_exactly(c10::ScalarType from, c10::ScalarType to);

}  // namespace fsdp::internal::checkpoint
