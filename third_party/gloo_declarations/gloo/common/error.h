// Included by LibTorch's ProcessGroupGloo.hpp, which uses nothing from it.
#pragma once
