// The names that safetensors and PyTorch's pickles give dtypes, and which conversions
// between them lose nothing.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

namespace fsdp::internal::checkpoint {

// "F32" for float; nullopt for a dtype that the format does not have.
std::optional<std::string> dtype_name(c10::ScalarType dtype);
std::optional<c10::ScalarType> dtype_of(std::string_view name);
// The bits of an element of a dtype of the format that no tensor has, such as "F4";
// nullopt for other names.
std::optional<int64_t> bits_of_dtype_without_tensors(std::string_view name);

// Of what Python calls it, "float32" for torch.float32.
std::optional<c10::ScalarType> dtype_of_python_name(std::string_view name);
// Of the class of its storages, "FloatStorage"; LibTorch writes such names of all dtypes.
std::optional<c10::ScalarType> dtype_of_storage_class(std::string_view name);

// Every value of `from` is a value of `to`: bf16 -> f32 -> f64, i8 -> i64, and equal
// ones.
bool widens_exactly(c10::ScalarType from, c10::ScalarType to);

}  // namespace fsdp::internal::checkpoint
