"""A repository rule that finds the LibTorch installed on this machine and makes it usable as @libtorch.

It looks, in this order, at $TORCH_DIR, at .venv in this checkout, at $VIRTUAL_ENV and at the torch package of python3.
Targets it writes:
  @libtorch//:libtorch   headers and libraries of LibTorch
  @libtorch//:cuda       CUDA and NCCL headers; defines USE_C10D_NCCL. Empty where LibTorch was built without CUDA.
"""

_FIX = """
Any one of these makes it available:
  tools/setup                     installs it into .venv of this checkout (tools/train and tools/test do this too)
  export TORCH_DIR=/some/torch    uses an existing one: the folder with include/ and lib/
  python3 -m pip install torch    in the active virtual environment
"""

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

# With --config=clang: its layering_check knows a header by its name alone.
config_setting(
    name = "every_header",
    define_values = {{"headers": "every"}},
)

# Else one directory label instead of ten thousand files: every sandboxed action would link each of them.
cc_library(
    name = "libtorch",
    hdrs = select({{
        ":every_header": glob(["{headers}/**"]),
        "//conditions:default": ["{headers}"],
    }}),
    includes = [
        "{headers}",
        "{headers}/torch/csrc/api/include",
    ],
    linkopts = [
        "-L{lib}",
        "-Wl,-rpath,{lib}",
        "-Wl,--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-Wl,--allow-shlib-undefined",
    ],
)

cc_library(
    name = "cuda",
    hdrs = select({{
        ":every_header": glob(["cuda/**"], allow_empty = True),
        "//conditions:default": {cuda_headers},
    }}),
    defines = {cuda_defines},
    includes = {cuda_headers},
    linkopts = {cuda_linkopts},
    deps = [":libtorch"],
)
"""

def _below(repository_ctx, directory, relative):
    return repository_ctx.path("%s/%s" % (directory, relative))

def _is_torch(repository_ctx, directory):
    return _below(repository_ctx, directory, "include/torch/csrc/api/include/torch/torch.h").exists

def _torch_in_environment(repository_ctx, root):
    """The torch package of a Python virtual environment, or None."""
    lib = _below(repository_ctx, root, "lib")
    if not lib.exists:
        return None
    for python in lib.readdir():
        torch = _below(repository_ctx, python, "site-packages/torch")
        if _is_torch(repository_ctx, torch):
            return torch
    return None

def _torch_of_python(repository_ctx):
    """The torch package that python3 would import, or None. Nothing is imported: that takes seconds."""
    python = repository_ctx.which("python3")
    if not python:
        return None
    result = repository_ctx.execute([
        python,
        "-c",
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')",
    ])
    if result.return_code != 0 or not result.stdout.strip():
        return None
    torch = repository_ctx.path(result.stdout.strip())
    return torch if _is_torch(repository_ctx, torch) else None

def _find_torch(repository_ctx):
    chosen = repository_ctx.os.environ.get("TORCH_DIR", "")
    if chosen:
        torch = repository_ctx.path(chosen)
        if not _is_torch(repository_ctx, torch):
            fail("TORCH_DIR=%s is not a LibTorch: it has no include/torch/csrc/api/include/torch/torch.h.%s" % (chosen, _FIX))
        return torch
    checkout = repository_ctx.path(Label("//:BUILD.bazel")).dirname
    places = [str(checkout) + "/.venv"]
    if repository_ctx.os.environ.get("VIRTUAL_ENV", ""):
        places.append(repository_ctx.os.environ["VIRTUAL_ENV"])
    for place in places:
        torch = _torch_in_environment(repository_ctx, place)
        if torch:
            return torch
    torch = _torch_of_python(repository_ctx)
    if not torch:
        fail("No LibTorch found: TORCH_DIR is not set, and neither %s nor python3 has the package torch.%s" %
             (" nor ".join(places), _FIX))
    return torch

def _torch_version(repository_ctx, torch):
    """A string that changes with the installed version, and is a legal part of a path."""
    wheel, archive = torch.get_child("version.py"), torch.get_child("build-version")
    text = "unknown"
    if wheel.exists:
        for line in repository_ctx.read(wheel).splitlines():
            if line.startswith("__version__"):
                text = line.split("=")[1].strip().strip("'\"")
    elif archive.exists:
        text = repository_ctx.read(archive).strip()
    return text.replace("+", "-")

def _cuda_include_dirs(repository_ctx, torch):
    """Where the CUDA and NCCL headers that fit this LibTorch are: in wheels beside it, else in the CUDA toolkit."""
    wheels = torch.dirname.get_child("nvidia")
    found = []
    if wheels.exists:
        found = [wheel.get_child("include") for wheel in wheels.readdir() if wheel.get_child("include").exists]
    else:
        toolkit = repository_ctx.path(repository_ctx.os.environ.get("CUDA_HOME", "/usr/local/cuda")).get_child("include")
        if toolkit.exists:
            found = [toolkit]
    has_cuda = any([directory.get_child("cuda_runtime_api.h").exists for directory in found])
    has_nccl = any([directory.get_child("nccl.h").exists for directory in found]) or \
               repository_ctx.path("/usr/include/nccl.h").exists
    return found if has_cuda and has_nccl else []

def _local_torch_impl(repository_ctx):
    torch = _find_torch(repository_ctx)
    cmake = _below(repository_ctx, torch, "share/cmake/Torch/TorchConfig.cmake")
    if cmake.exists and "_GLIBCXX_USE_CXX11_ABI=0" in repository_ctx.read(cmake):
        fail("The LibTorch at %s was built with the old C++ string ABI; take one with the C++11 ABI.%s" % (torch, _FIX))

    # The version is part of the path, so that another version never meets objects compiled against this one.
    headers = "include-" + _torch_version(repository_ctx, torch)
    repository_ctx.symlink(torch.get_child("include"), headers)

    cuda_headers = []
    if _below(repository_ctx, torch, "lib/libtorch_cuda.so").exists:
        for directory in _cuda_include_dirs(repository_ctx, torch):
            link = "cuda/" + directory.dirname.basename
            repository_ctx.symlink(directory, link)
            cuda_headers.append(link)
    repository_ctx.file("BUILD.bazel", _BUILD.format(
        cuda_defines = repr(["USE_C10D_NCCL"] if cuda_headers else []),
        cuda_headers = repr(sorted(cuda_headers)),
        cuda_linkopts = repr(["-ltorch_cuda", "-lc10_cuda"] if cuda_headers else []),
        headers = headers,
        lib = torch.get_child("lib"),
    ))

local_torch = repository_rule(
    implementation = _local_torch_impl,
    doc = "Makes the LibTorch installed on this machine usable as a Bazel repository.",
    configure = True,
    environ = [
        "CUDA_HOME",
        "TORCH_DIR",
        "VIRTUAL_ENV",
    ],
    local = True,
)
