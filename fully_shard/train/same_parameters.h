// Whether ranks that name parameters in one call mean the same ones: of two models of one
// class all shapes are equal, so sizes tell nothing. A parameter is known by its unit's
// number on the process group and its place there, a tensor-parallel one by its path and
// the number of its model, which are alike on all ranks.
//
//   SameParameters mine;
//   for (const auto& parameter : parameters) mine.add(parameter);
//   ...                          // every rank's mine.numbers() as the rows of a tensor
//   mine.check(rows, mesh, {.call = "clip_grad_norm_", .verb = "clips"});
//
// Ranks are compared as far as their parameters lie on the same mesh: stages of a
// pipeline and experts have models of their own. DTensors that are neither are not known.
#pragma once

#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal {

class SameParameters {
 public:
  // A mesh and a hash for each of so many meshes; what lies on further ones is not
  // compared.
  static constexpr int64_t kMeshes = 4;
  static constexpr int64_t kNumbers = 2 * kMeshes;

  // Nothing unless it is the parameter of a unit, or tensor-parallel.
  void add(const at::Tensor& parameter);
  // Whole numbers that doubles have exactly.
  std::array<double, kNumbers> numbers() const;

  struct Call {
    std::string call;         // "clip_grad_norm_"
    std::string verb;         // "clips"
    std::string consequence;  // "nothing was scaled"
  };
  // Throws ValueError on every rank alike, naming a parameter of both, where two ranks of
  // one mesh mean different ones. rows: double [ranks of `mesh`, kNumbers], by place. On
  // a device nothing is looked at: it would stall the host, and as making a unit is not
  // announced there, replicas may number them differently. Collective over `mesh` where
  // it throws, local else.
  void check(const at::Tensor& rows, const DeviceMesh& mesh, const Call& call) const;

 private:
  struct OnMesh {
    double mesh;
    uint64_t hash;
    std::vector<at::Tensor> parameters;
  };
  [[noreturn]] void report(double on, int64_t first, int64_t other, const DeviceMesh& mesh,
                           const Call& call) const;
  std::string text(double on) const;

  std::vector<OnMesh> meshes_;  // in the order met
};

}  // namespace fsdp::internal
