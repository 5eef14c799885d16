// Messages between two ranks of one group, told apart by tags: messages of the same tag
// from the same rank arrive in order, and messages of different tags never meet. On Gloo
// they take half the time of a collective of the same bytes, since no thread but the
// caller's and the transport's own is involved. CPU only.
#pragma once

#include "device_mesh/collectives/backend/pending.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/stamp.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::internal {

// Of the notices of an issue log: none that a user of the same group would choose.
inline constexpr int kNoticeTag = 1 << 30;
// Of what follows a notice: different for whatever differs in kind, unit, size or
// history, and never kNoticeTag, so bytes of operations that do not belong together never
// meet (Gloo would end the process where their sizes differ).
int tag_of(const Stamp& stamp);

// Whether a collective of `memory` had better be made of messages: on Gloo, and in a
// group of one, where nothing is sent.
bool better_by_messages(const Group& group, const at::Tensor& memory);

// Both return at once; the tensor, contiguous bytes, must stay alive and untouched until
// wait() returns. Pending::finished() says nothing about them.
Pending send(const Group& group, at::Tensor bytes, int64_t to, int tag);
Pending receive(const Group& group, at::Tensor bytes, int64_t from, int tag);

}  // namespace fsdp::internal
