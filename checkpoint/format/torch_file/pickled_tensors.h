// The tensors that an object holds which Python's or LibTorch's torch.save pickled: a
// state dict, dictionaries and lists with tensors at any depth, whole modules of any
// class, and TorchScript modules. Nothing is executed; where elements lie is said by the
// number of a storage and strides.
//
//   PickledTensors found = tensors_in(pickle);
//   found.tensors[0].name;  // "encoder.0.weight"
#pragma once

#include "checkpoint/files/file_checks.h"
#include "checkpoint/format/pickle/pickle.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct PickledTensor {
  std::string name = {};  // keys around it, joined by "."; empty: the object itself
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape = {}, strides = {};  // strides in elements, as many as sizes
  std::string storage = {};                       // which of the file's
  int64_t offset = 0;              // of its first element in the storage, in elements
  bool conj = false, neg = false;  // its values are the conjugates, or the negatives
};

struct PickledStorage {
  int64_t element_bytes = 1;
  int64_t numel = 0;
};

struct PickledTensors {
  std::vector<PickledTensor> tensors = {};
  std::vector<Unread> unread = {};
};

// Dictionaries and modules give names as state dicts do: a module's are those of its
// parameters, buffers and sub-modules; a list's elements are called by their indices and
// another object's attributes by their names. Throws std::runtime_error for an object
// that refers to the same things millions of times.
PickledTensors tensors_in(const Pickle& pickle);

// All storages that the pickle refers to, read or not. Throws std::runtime_error for one
// that is not described as torch.save does.
std::map<std::string, PickledStorage> storages_in(const Pickle& pickle);

}  // namespace fsdp::internal::checkpoint
