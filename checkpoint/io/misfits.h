// What does not fit between the values that are offered, in a file or a dict, and the
// tensors that are to have them: names that only one side has, other shapes and dtypes,
// and different values for what is one tensor here.
#pragma once

#include "checkpoint/format/catalog/catalog.h"
#include "checkpoint/io/tensor_reader.h"
#include "checkpoint/ranks/world.h"

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// Names that the models of a job and a file do not share.
struct UnmatchedNames {
  std::vector<std::string> missing;     // of a model, and not in the file
  std::vector<std::string> unexpected;  // in the file, and of no model
};

// Equal for equal names.
std::string fingerprint_of(const UnmatchedNames& names);

// Of ranks whose models differ, as the stages of a pipeline do: what some rank misses,
// and what no rank expects. Collective over `world`.
UnmatchedNames unmatched_by_all(const UnmatchedNames& mine, const World& world,
                                const std::string& what);

// Throws ValueError that lists what there is of both. `place`: "the file".
void check_no_names(const std::vector<std::string>& missing, const std::string& place,
                    const std::vector<std::string>& unexpected, const std::string& advice);

// Whether values of one shape and dtype may become those of a tensor: what the values are
// and how messages call the place where they come from.
struct Offered {
  c10::ScalarType dtype;
  c10::IntArrayRef shape;
  std::string place;       // "in the file"
  std::string advice;      // against a conversion that loses something
  std::string codec = {};  // what the codes are called that it offers; empty: not known
};
// kInvalidArgument for another shape, for codes that are not the target's, and for a
// conversion that loses something unless `cast`.
absl::Status check_fits(const std::string& name, const at::Tensor& target, const Offered& offered,
                        bool cast);

// Collects what does not fit, so that one error names all of it.
class Misfits {
 public:
  // Keeps kInvalidArgument; throws for other errors.
  void note(const absl::Status& status);
  // Throws ValueError with the first 20 and the number of the others.
  void raise_any() const;

 private:
  std::string text_;
  int64_t count_ = 0;
};

// Whether what is one tensor in a model is one where it comes from, too: under each of
// its names the same values, bit by bit. Of two plain tensors, or of this rank's parts of
// two DTensors that lie alike; else false. Local.
bool have_same_values(const at::Tensor& a, const at::Tensor& b);

// Throws ValueError that names both for different values of `target`, called `name`,
// under two of `stored_names`. Reads this rank's part of each. Local.
void check_tied_in_file(const Catalog& catalog, const std::vector<std::string>& stored_names,
                        const std::string& name, const at::Tensor& target, ReadRules rules);

}  // namespace fsdp::internal::checkpoint
