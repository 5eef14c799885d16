#include "device_mesh/all_reduce.h"

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/scratch_memory.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/process_group.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace fsdp {
namespace {

const char* name_of(Reduce op) {
  switch (op) {
    case Reduce::kSum:
      return "sum";
    case Reduce::kMean:
      return "mean";
    case Reduce::kMax:
      return "maximum";
    case Reduce::kMin:
      return "minimum";
  }
  TORCH_CHECK_VALUE(false, "all_reduce: op is ", static_cast<int>(op), ", expected one of Reduce");
}

void check_value(const at::Tensor& value, const DeviceMesh& mesh, Reduce op) {
  TORCH_CHECK_VALUE(value.defined() && value.layout() == c10::kStrided && value.has_storage(),
                    "all_reduce: 'value' must be a plain tensor (rank ", mesh.rank(),
                    "); of a DTensor, pass full_tensor() or to_local()");
  TORCH_CHECK_VALUE(value.device().type() == mesh.device_type(), "all_reduce: 'value' is on ",
                    value.device(), ", the mesh on ", c10::DeviceTypeName(mesh.device_type(), true),
                    " (rank ", mesh.rank(), ")");
  TORCH_CHECK_VALUE(op != Reduce::kMean || value.is_floating_point() || value.is_complex(),
                    "all_reduce: the mean of 'value', whose dtype is ", value.scalar_type(),
                    ": pass a floating value (rank ", mesh.rank(), ")");
}

// Every rank's `row` of bytes, [ranks of the mesh, bytes], in their order. `call` is the
// public function, `what` may say more than ranks must have in common.
at::Tensor rows_of_mesh(const at::Tensor& row, const DeviceMesh& mesh, const std::string& call,
                        const std::string& what) {
  return internal::rows_of_all(internal::collectives_of(mesh),
                               {.row = row, .what = what, .call = call});
}

constexpr int64_t kTagWords = 2;
constexpr int64_t kTagBytes = kTagWords * int64_t{sizeof(int64_t)};

// What the ranks must have in common: the reduction and the dtype.
at::Tensor tag_of(const at::Tensor& value, Reduce op) {
  return at::tensor({static_cast<int64_t>(op), static_cast<int64_t>(value.scalar_type())},
                    c10::kLong);
}

void check_tags(const at::Tensor& rows, const DeviceMesh& mesh) {
  const at::Tensor bytes = rows.narrow(1, 0, kTagBytes).cpu().contiguous().view({-1});
  const at::Tensor tags = bytes.view(c10::kLong).view({-1, kTagWords});
  const auto describe = [&](int64_t place) {
    return c10::str("rank ", mesh.ranks()[static_cast<size_t>(place)], " for the ",
                    name_of(static_cast<Reduce>(tags[place][0].item<int64_t>())), " of ",
                    static_cast<c10::ScalarType>(tags[place][1].item<int64_t>()), " values");
  };
  for (int64_t place = 1; place < tags.size(0); ++place) {
    TORCH_CHECK_VALUE(tags[place].equal(tags[0]), "all_reduce: ", describe(0), " and ",
                      describe(place), " have called it (rank ", mesh.rank(), ")");
  }
}

at::Tensor reduce_rows(const at::Tensor& rows, Reduce op) {
  switch (op) {
    case Reduce::kMax:
      return at::amax(rows, {0});
    case Reduce::kMin:
      return at::amin(rows, {0});
    default:
      break;
  }
  const at::Tensor total = at::sum(rows, {0}, /*keepdim=*/false, rows.scalar_type());
  return op == Reduce::kMean ? total / rows.size(0) : total;
}

at::Tensor on_mesh(const at::Tensor& value, const DeviceMesh& mesh) {
  return value.to(local_device(mesh));
}

}  // namespace

bool is_rank_zero() {
  if (!is_process_group_initialized()) return launch_environment().rank == 0;
  return internal::group_rank(default_process_group()) == 0;
}

void barrier(const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const at::Tensor own = on_mesh(at::zeros({1}, c10::kByte), mesh);
  // The bytes of all are there: all have come.
  static_cast<void>(rows_of_mesh(own, mesh, "barrier", "barrier").cpu());
}

at::Tensor all_reduce(const at::Tensor& value, const DeviceMesh& mesh, Reduce op) {
  const at::NoGradGuard no_grad;
  check_value(value, mesh, op);
  const auto what = c10::str("all_reduce (", name_of(op), ")");
  const at::Tensor body = value.detach().resolve_conj().resolve_neg().contiguous();
  const at::Tensor tag = tag_of(value, op).view(c10::kByte).to(value.device());
  const at::Tensor rows =
      rows_of_mesh(at::cat({tag, internal::tensor_bytes(body)}), mesh, "all_reduce", what);
  check_tags(rows, mesh);
  auto shape = value.sizes().vec();
  shape.insert(shape.begin(), rows.size(0));
  const at::Tensor bodies =
      rows.narrow(1, kTagBytes, rows.size(1) - kTagBytes).contiguous().view({-1});
  return reduce_rows(bodies.view(value.scalar_type()).view(shape), op);
}

double internal::all_reduce_value(double value, const DeviceMesh& mesh, Reduce op) {
  return all_reduce(on_mesh(at::scalar_tensor(value, c10::kDouble), mesh), mesh, op).item<double>();
}

int64_t internal::all_reduce_value(int64_t value, const DeviceMesh& mesh, Reduce op) {
  return all_reduce(on_mesh(at::scalar_tensor(value, c10::kLong), mesh), mesh, op).item<int64_t>();
}

}  // namespace fsdp
