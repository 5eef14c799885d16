// Declares what LibTorch's ProcessGroupGloo.hpp mentions of a Gloo context. Objects of these types are made and used by
// LibTorch alone; the declarations must never be instantiated.
#pragma once

#include <chrono>

namespace gloo {

namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
