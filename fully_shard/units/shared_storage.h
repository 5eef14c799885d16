// Parameters whose memory something else uses as well. fully_shard moves a parameter's
// values into shards, and whatever shared the memory would go on with the old ones.
// Being the same tensor under two names is a tie, and is kept. Tensors of one storage
// that have no element in common share nothing. Local.
#pragma once

#include "fully_shard/units/module_tree.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <unordered_map>
#include <vector>

namespace fsdp::internal {

// The parameters and buffers at and below some modules, by their storages. Keeps them
// alive; no handle of a storage may come or go while it lives.
class StorageUsers {
 public:
  explicit StorageUsers(const std::vector<torch::nn::Module*>& modules);
  ~StorageUsers();
  StorageUsers(const StorageUsers&) = delete;
  StorageUsers& operator=(const StorageUsers&) = delete;

  // Whether nothing else has a handle of the storage of `tensor`.
  bool are_all(const at::Tensor& tensor) const;
  // Throws ValueError for a parameter that has elements in common with another of them,
  // naming both; that belongs to a graph that is alive; or whose storage has a handle
  // that is none of theirs: a view that the model keeps, or a parameter or buffer
  // elsewhere, disjoint or not. Reads no values.
  void check(const FoundParam& param, const ErrorContext& context) const;

 private:
  class Users;
  void check_overlaps(const FoundParam& param, const ErrorContext& context) const;

  std::unordered_map<const c10::StorageImpl*, std::unique_ptr<Users>> by_storage_;
};

// Checks `fresh`, the parameters to be sharded. Throws for the first that users.check()
// throws for.
void validate_storages(const StorageUsers& users, const std::vector<const FoundParam*>& fresh,
                       const ErrorContext& context);

// The parameters at and below `module` that tensors elsewhere share a storage with get
// memory of their own, in place.
void separate_from_others(torch::nn::Module& module);
// As separate_storages().
void separate_slices(torch::nn::Module& module, const ErrorContext& context);

}  // namespace fsdp::internal
