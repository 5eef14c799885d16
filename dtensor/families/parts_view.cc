// Views of parts that the operator itself would take otherwise.
#include "dtensor/families/parts.h"
#include "dtensor/ways/table.h"
#include "dtensor/ways/view_ways.h"

#include <c10/core/WrapDimMinimal.h>

#include <utility>

namespace fsdp::internal {
namespace {

CallGeometry whole_geometry(const OperatorCall& call, const DTensorSpec& self) {
  return {.operands = {{.shape = self.shape(), .stride = self.stride(), .element_size = 1}},
          .plain = ArgumentKinds(call.handle().schema()).plain_of(call)};
}

// Each piece is what this rank has of it: of a piece of which it has nothing too.
std::vector<c10::IValue> split_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const DTensorSpec self = placed.operand(0);
  const at::Tensor local = call.argument(0).toTensor();
  const int64_t dim = c10::maybe_wrap_dim(call.argument(2).toInt(), local.dim());
  if (!self.is_cut(dim)) return call.run();
  std::vector<at::Tensor> pieces;
  for (const Range& range : split_ranges(whole_geometry(call, self))) {
    const Range own = local_range(self.layout(), placed.mesh().coordinate(), dim, range);
    pieces.push_back(local.narrow(dim, own.start, own.length));
  }
  return {std::move(pieces)};
}

// Not those dimensions of which only the part is of size 1.
std::vector<c10::IValue> squeeze_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const DimMap map = squeeze_map(whole_geometry(call, placed.operand(0)));
  std::vector<int64_t> dims;
  for (size_t d = 0; d < map.size(); ++d) {
    if (map[d] == kGone) dims.push_back(static_cast<int64_t>(d));
  }
  return {call.argument(0).toTensor().squeeze(dims)};
}

// _reshape_alias(self, size, stride): the strides of a part follow from its own.
std::vector<c10::IValue> reshape_part(OperatorCall& call, const PlacedOnMesh& placed) {
  const auto shape = placed.result(0).local_shape(placed.mesh().coordinate());
  return {call.argument(0).toTensor().view(shape)};
}

}  // namespace

void add_view_parts(PartsTable& table) {
  const auto add = [&table](const char* name, RunOnParts run) {
    table[name] = {ways_table().at(name), run};
  };
  for (const char* name : {"split.Tensor", "split_with_sizes."}) add(name, split_part);
  for (const char* name : {"squeeze.", "squeeze.dim", "squeeze.dims"}) add(name, squeeze_part);
  add("_reshape_alias.", reshape_part);
}

}  // namespace fsdp::internal
