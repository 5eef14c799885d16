// What the calls in a pickle make of tensors: which functions of Python's torch and of
// TorchScript rebuild one, from which storage, and which make something that is not read.
#pragma once

#include "checkpoint/format/torch_file/pickled_tensors.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::internal::checkpoint {

// What is wrong with one tensor, behind "a tensor"; the others are read.
struct NotRead : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// "torch._utils _rebuild_tensor_v2" -> "torch._utils._rebuild_tensor_v2"
std::string python_name(std::string_view global);

// Whether a function makes a tensor of a storage, and with which arguments.
bool rebuilds_tensor(std::string_view callee);
// Throws NotRead. REQUIRES: rebuilds_tensor(function).
PickledTensor tensor_of(std::string_view function, const std::vector<const Pickled*>& arguments,
                        const std::string& name);

// Calls that give their first argument back, such as that of a parameter or of a tuple
// with names.
bool passes_on(std::string_view callee);
// Of a subclass of tensors: (function, class, arguments, state).
bool rebuilds_subclass(std::string_view callee);
// Calls whose results are values like numbers, or sets of them.
bool makes_value(std::string_view callee);
bool makes_set(std::string_view callee);
// "a sparse tensor": what a function makes that is not read; empty: no tensor.
std::string unread_kind(std::string_view callee);

bool is_storage(const Pickled& value);

// ("storage", class, key, device, elements[, view]), where a view of the time before 0.4
// is (key, offset, elements) of the storage.
struct StorageReference {
  std::string key = {};
  std::string_view class_name = {};
  int64_t numel = 0;
  int64_t offset = 0;
};
// Throws NotRead.
StorageReference storage_of(const Pickled& value);
int64_t element_bytes(const StorageReference& storage);

}  // namespace fsdp::internal::checkpoint
