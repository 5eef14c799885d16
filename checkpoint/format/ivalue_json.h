// IValues as JSON: None, bool, int, double, string, and lists and string-keyed
// dictionaries of them. Tensors, where allowed, are kept aside under a name.
#pragma once

#include "checkpoint/format/json.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <map>
#include <string>

namespace fsdp::internal::checkpoint {

using TensorsByName = std::map<std::string, at::Tensor>;

// `name` says in errors what it is. Throws ValueError for other values, and for tensors
// where `tensors` is null; else a tensor is added there as `name`, or `name` with an
// index or key.
Json to_json(const c10::IValue& value, const std::string& name, TensorsByName* tensors = nullptr);
// Lists of one scalar type become typed lists, others lists of Any.
c10::IValue from_json(const Json& json, const TensorsByName& tensors = {});
// The same, as the type that `like` has: tuples, optionals. For options of optimizers.
c10::IValue from_json_like(const Json& json, const c10::IValue& like);

}  // namespace fsdp::internal::checkpoint
