"""What tools/mutants.py makes of sources, and what it leaves alone. Run from the repository by .ci/sources."""

import pathlib
import re
import sys
import unittest

sys.path.insert(0, "tools")
import mutants  # noqa: E402
import run_mutations  # noqa: E402


def made(source, operator):
    """What each mutant of this kind makes of the source."""
    return [each.applied(source) for each in mutants.mutants_of("a.cc", source) if each.operator == operator]


def in_body(statements):
    return "void f() {\n" + statements + "\n}\n"


class Operators(unittest.TestCase):
    def expect(self, operator, statements, *after):
        self.assertEqual(made(in_body(statements), operator), [in_body(each) for each in after])

    def test_calls_and_assignments_are_deleted_and_declarations_are_not(self):
        self.expect("delete", "g(1);", ";")
        self.expect("delete", "a.b_[2] = c;", ";")
        self.expect("delete", "*a = c;", ";")
        self.expect("delete", "++a;", ";")
        for kept in ("int a = g();", "const auto* a = g();", "std::vector<int> a(g()); return a;", "A& a = *b;"):
            self.expect("delete", kept)

    def test_an_object_that_nobody_names_is_deleted_unless_it_is_a_lock(self):
        self.expect("delete", "const Scope scope(1);", ";")
        self.expect("delete", "const Scope scope(1);\nint a = scope.b();")
        self.expect("delete", "const std::lock_guard lock(mutex_);")

    def test_checks_are_deleted_and_their_texts_left_alone(self):
        check = 'TORCH_CHECK_VALUE(a, "b ", c == 1 ? "d" : "e", true);'
        self.expect("delete", check, ";")
        self.expect("negate", check)
        self.expect("bool", check)

    def test_asserts_are_left_alone(self):
        statement = in_body("TORCH_INTERNAL_ASSERT(a == b);")
        self.assertEqual([each.operator for each in mutants.mutants_of("a.cc", statement)], ["return"])

    def test_conditions_are_never_and_always_true(self):
        self.expect("never", "if (a) g();", "if (false && (a)) g();")
        self.expect("never", "if (a || b) g();", "if (false && (a || b)) g();")
        self.expect("always", "if (a) g();", "if (true || (a)) g();")
        self.expect("never", "if (const auto* a = b()) g();", "if (const auto* a = b(); false) g();")
        self.expect("never", "if (auto a = b(); a > 1) g();", "if (auto a = b(); false && (a > 1)) g();")
        self.expect("never", "while (a) g();", "while (false && (a)) g();")
        self.expect("never", "if constexpr (a) g();")

    def test_what_is_all_that_an_if_does_is_not_deleted_too(self):
        self.expect("delete", "if (a) g();")
        self.expect("delete", "if (a) {\ng();\n}", "if (a) {\n;\n}")

    def test_loops_are_deleted(self):
        self.expect("delete", "for (auto& a : b) a = 1;", ";")

    def test_operands_are_dropped(self):
        self.expect("drop-operand", "c = a() && !b;", "c =  !b;", "c = a() ;")
        self.expect("drop-operand", "c = a && b || d;", "c =  b || d;", "c = a  || d;", "c =  d;", "c = a && b ;")
        self.expect("drop-operand", "g(1, a || b, 2);", "g(1,  b, 2);", "g(1, a , 2);")

    def test_comparisons_are_negated_and_bounds_moved(self):
        self.expect("negate", "c = a == b;", "c = a != b;")
        self.expect("negate", "c = a ? b : d;", "c = !(a) ? b : d;")
        self.expect("bound", "c = a < b;", "c = a <= b;")
        self.expect("bound", "std::vector<int> c;")
        self.expect("off-by-one", "c = a + 1;", "c = a ;")
        self.expect("bool", "g(/*b=*/true);", "g(/*b=*/false);")

    def test_exchange_leaves_what_was_there(self):
        self.expect("exchange", "c = std::exchange(a_, {});", "c = a_;")

    def test_conversions_are_dropped(self):
        self.expect("drop-call", "c = a.to(d).clone();", "c = a.clone();", "c = a.to(d);")

    def test_functions_return_early(self):
        self.assertEqual(made("void f() { g(); }", "return"), ["void f() { return; g(); }"])
        both = [f"bool f() {{ return {each}; return a; }}" for each in ("true", "false")]
        self.assertEqual(made("bool f() { return a; }", "return"), both)
        self.assertEqual(made("T f() { return a; }", "return"), ["T f() { return {}; return a; }"])
        self.assertEqual(made("const T& f() { return a; }", "return"), [])

    def test_bodies_of_lambdas_are_read_and_braces_of_values_are_not(self):
        self.expect("delete", "int a = g([&](int b) -> int { h(b); return 1; });", "int a = g([&](int b) -> int { ; return 1; });")
        self.expect("delete", "T a{g(), {1, 2}}; return a;")


class Places(unittest.TestCase):
    def functions(self, source):
        return [each.function for each in mutants.mutants_of("a.cc", source) if each.operator == "delete"]

    def test_comments_strings_and_lines_of_the_preprocessor_say_nothing(self):
        prose = '// g();\n/* g(); */\n#define G \\\n  g();\nconst char* a = R"(g(); ")";\nconst char b = \';\';'
        self.assertEqual(made(in_body(prose), "delete"), [])

    def test_functions_are_named_with_their_classes(self):
        self.assertEqual(self.functions("namespace a {\nclass B : C {\n public:\n  void d() const { g(); }\n};\n}\n"), ["B::d"])
        self.assertEqual(self.functions("template <typename T>\nT A<T>::b(int c) { g(); }\n")[0][-3:], "::b")
        self.assertEqual(self.functions("A::~A() { g(); }\n"), ["A::~A"])
        self.assertEqual(self.functions("A::A(int b) : b_{b}, c_(b) {\n  g();\n}\nvoid d() { g(); }\n"), ["A::A", "d"])
        self.assertEqual(self.functions("bool A::operator<(const A& b) const { g(); }\n"), ["A::operator<"])

    def test_names_stay_when_other_code_moves_and_lines_break_elsewhere(self):
        before = "void f() { g(1, 2); g(1, 2); }\n"
        after = "int a;\nvoid h() { g(1, 2); }\nvoid f() {\n  g(1,\n    2);\n  k();\n  g(1, 2);\n}\n"
        names = {each.name for each in mutants.mutants_of("a.cc", before)}
        self.assertEqual(len(names), 3)
        self.assertLessEqual(names, {each.name for each in mutants.mutants_of("a.cc", after)})

    def test_every_source_of_the_library_is_read(self):
        tests = pathlib.Path("tests")
        for program in set(run_mutations.PROGRAMS.values()):
            self.assertIn(f'name = "{program}"', (tests / "BUILD.bazel").read_text())
        for layer in run_mutations.LAYERS:
            self.assertTrue(run_mutations.program_of(tests / layer / "a_test.cc"), layer)

    def test_every_folder_with_sources_is_a_layer_or_what_uses_them(self):
        folders = {each.parent.name for each in pathlib.Path().glob("*/BUILD.bazel")}
        self.assertEqual(folders - {"benchmarks", "examples", "tests"}, set(run_mutations.LAYERS))


class Suites(unittest.TestCase):
    def test_those_that_are_named_exist(self):
        text = "\n".join(each.read_text() for each in pathlib.Path("tests").rglob("*_test.cc"))
        known = set(re.findall(r"^TEST(?:_F|_P)?\((\w+),", text, re.MULTILINE))
        named = " ".join(run_mutations.ALSO_SEE.values()).split()
        self.assertEqual([each for each in named if each not in known], [])


if __name__ == "__main__":
    unittest.main()
