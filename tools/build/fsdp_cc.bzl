"""The C++ rules of this project: warnings are errors here, and only here (LibTorch's headers are system headers)."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")

_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    # Fields left out of a designated initialiser have the default that the struct gives them.
    "-Wno-missing-field-initializers",
    # Files that are compiled together (below) seem to be headers.
    "-Wno-subobject-linkage",
]

# LibTorch is a release build, and the layout of some of its classes depends on that.
_RELEASE = ["-DNDEBUG"]

# One configuration for training and tests: what is run is optimised, and checks that cost are
# switched on by tests (fsdp::set_write_checks).
_OPTIMISED = ["-O2"] + _RELEASE

def _one_source_per_folder(name, srcs, testonly):
    """The files of each folder behind one another: LibTorch's headers take five times as long to compile as what a file
    of ours says. Messages and debuggers name the files. What is in an anonymous namespace must differ within a folder."""
    folders = {}
    for src in srcs:
        folders.setdefault(src.rpartition("/")[0], []).append(src)
    together = []
    for folder, files in folders.items():
        source = "%s_sources/%s.cc" % (name, folder or native.package_name())
        native.genrule(
            name = source.replace("/", "_"),
            testonly = testonly,
            srcs = files,
            outs = [source],
            cmd = "for f in $(SRCS); do echo \"#line 1 \\\"$$f\\\"\"; cat $$f; done > $@",
        )
        together.append(source)
    return together

def fsdp_cc_library(name, srcs = [], copts = [], testonly = False, **kwargs):
    """A library. It is always linked whole: its dispatcher kernels are registered by static initialisers."""
    cc_library(
        name = name,
        testonly = testonly,
        srcs = _one_source_per_folder(name, srcs, testonly),
        alwayslink = True,
        copts = _WARNINGS + _OPTIMISED + copts,
        linkstatic = True,
        **kwargs
    )

def fsdp_cc_binary(name, copts = [], **kwargs):
    """A program."""
    cc_binary(
        name = name,
        copts = _WARNINGS + _OPTIMISED + copts,
        **kwargs
    )

def fsdp_cc_shared_library(name, deps, **kwargs):
    """A shared library that holds all of `deps`, with the registrations of their kernels."""
    cc_binary(
        name = name,
        linkopts = ["-Wl,-soname," + name],
        linkshared = True,
        deps = deps,
        **kwargs
    )

def _compiled_by_folder(name, srcs):
    """One source per folder of `srcs`, which includes that folder's files: LibTorch's headers take ten times as long to
    compile as what a file of tests says."""
    folders = {}
    for src in srcs:
        folders.setdefault(src.rpartition("/")[0], []).append(src)
    together = []
    for folder, files in folders.items():
        source = "%s_sources/%s.cc" % (name, folder)
        includes = ['#include "%s/%s"' % (native.package_name(), file) for file in files]
        native.genrule(
            name = source.replace("/", "_"),
            testonly = True,
            outs = [source],
            cmd = "cat > $@ <<'END'\n%s\nEND" % "\n".join(includes),
        )
        together.append(source)
    return together

def fsdp_cc_test(name, srcs, copts = [], deps = [], size = "large", **kwargs):
    """A GoogleTest program. Its main function is in //tests:support."""
    sources = [src for src in srcs if src.endswith(".cc")]
    cc_library(
        name = name + "_files",
        testonly = True,
        textual_hdrs = sources,
    )
    cc_test(
        name = name,
        size = size,
        srcs = [src for src in srcs if src not in sources] + _compiled_by_folder(name, sources),
        copts = _WARNINGS + _RELEASE + ["-O0"] + copts,
        linkstatic = True,
        deps = deps + [name + "_files", "@googletest//:gtest"],
        **kwargs
    )
