"""What can be broken in a C++ source, one small change at a time: the mutants that tools/mutations draws from.

It reads sources as tools/format leaves them: tokens, brackets and statements, no types. What it cannot tell from these it leaves
alone. A change that does not compile is drawn again by tools/mutations."""

import dataclasses
import hashlib
import re

TOKEN = re.compile(
    r"[A-Za-z_]\w*|\d[\w.']*|<=>|<<=|->|::|\+\+|--|&&|\|\||[<>=!+\-*/%&|^]=|\"[^\"]*\"|'[^']*'|\S"
)
# Comments, lines of the preprocessor, and literals with what is in them.
APART = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:\\\n|[^\n])*"
    r"|R\"(?P<end>[^()\s]*)\(.*?\)(?P=end)\"|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'",
    re.DOTALL | re.MULTILINE,
)
OPENS, CLOSES = "([{", ")]}"
CLASSES = {"class", "struct", "union", "enum"}
# Statements in which nothing is changed: what they say is no behaviour, or the types decide whether it may change.
LEFT_ALONE = re.compile(
    r"(TORCH_INTERNAL_ASSERT\w*|TORCH_WARN\w*|assert|static_assert|throw|using|typedef|goto|C10_UNUSED|RECORD_\w+)\b"
)
CHECK = re.compile(r"(TORCH_CHECK\w*|C10_CHECK\w*)$")
# Where the operand of an operator begins or ends, beside brackets.
AROUND_OPERANDS = {",", ";", "?", ":", "=", "return", "+=", "-=", "|=", "&="}
OTHER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "true": "false", "false": "true"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str
    function: str
    operator: str
    statement: str  # its tokens, or those of the head of an `if` or a loop
    begin: int
    end: int
    text: str  # in place of what is between begin and end
    occurrence: int  # among those that are alike in all of the above but the place

    @property
    def name(self):
        """Stays as it is when code elsewhere in the file moves or is laid out anew."""
        of = hashlib.sha1(f"{self.statement} {self.text} {self.occurrence}".encode()).hexdigest()[:8]
        return f"{self.file}:{self.function}:{self.operator}:{of}"

    def applied(self, source):
        return source[: self.begin] + self.text + source[self.end :]


def without_prose(source):
    """The source with blanks instead of comments, of lines of the preprocessor and of what is in literals; as long."""

    def blank(found):
        text = re.sub(r"[^\n]", " ", found.group())
        return text if found.group()[-1] not in "\"'" else '"' + text[1:-1].replace("\n", " ") + '"'

    return APART.sub(blank, source)


class Parser:
    """Goes through one source and collects its mutants."""

    def __init__(self, file, source):
        self.file, self.source = file, source
        found = [(each.group(), each.start()) for each in TOKEN.finditer(without_prose(source))]
        self.tokens = [token for token, _ in found]
        self.at = [start for _, start in found]
        self.partner = self._partners()
        self.mutants, self.seen, self.function = [], {}, ""
        self.container(0, len(self.tokens), "")

    def _partners(self):
        partner, open_ = {}, []
        for i, token in enumerate(self.tokens):
            if token in OPENS:
                open_.append(i)
            elif token in CLOSES and open_:
                partner[i] = open_.pop()
                partner[partner[i]] = i
        return partner

    def end_of(self, i):
        """Where token i ends in the source."""
        return self.at[i] + len(self.tokens[i])

    def words(self, begin, end):
        return " ".join(self.tokens[begin:end])

    def add(self, operator, statement, begin, end, text):
        """A mutant that has `text` in place of tokens [begin, end); before token `begin` where these are none."""
        key = (self.function, operator, statement, text)
        self.seen[key] = self.seen.get(key, -1) + 1
        until = self.end_of(end - 1) if end > begin else self.at[begin]
        self.mutants.append(
            Mutant(self.file, self.function, operator, statement, self.at[begin], until, text, self.seen[key])
        )

    def find(self, begin, end, *tokens):
        """The first of `tokens` in [begin, end) that is in no brackets; `end` where there is none."""
        i = begin
        while i < end:
            if self.tokens[i] in tokens:
                return i
            i = self.partner.get(i, i) + 1 if self.tokens[i] in OPENS else i + 1
        return end

    # Namespaces, classes and what is in them.

    def container(self, begin, end, inside):
        i = begin
        while i < end:
            stop = self.find(i, end, ";", "{")
            if stop == end or self.tokens[stop] == ";":
                i = stop + 1
                continue
            i = self.definition(i, stop, end, inside)

    def definition(self, begin, brace, end, inside):
        """What begins at `begin` and has its first brace at `brace`; returns where what follows it begins."""
        while self.tokens[begin] in ("template", "public", "private", "protected", ":"):
            begin += 1
            if self.tokens[begin - 1] == "template":
                begin = self.end_of_template(begin)
        head = self.tokens[begin:brace]
        parenthesis = self.find(begin, brace, "(")
        while self.tokens[parenthesis - 1] in ("alignas", "__attribute__", "explicit"):
            parenthesis = self.find(self.partner[parenthesis] + 1, brace, "(")
        if "namespace" in head or "extern" in head or (CLASSES & set(head) and parenthesis == brace):
            name = ""
            if CLASSES & set(head):
                bases = self.find(begin, brace, ":")
                name = inside + self.tokens[bases - 1 - (self.tokens[bases - 1] == "final")] + "::"
            if "enum" not in head:
                self.container(brace + 1, self.partner[brace], name or inside)
            return self.partner[brace] + 1
        if parenthesis == brace or "=" in self.tokens[begin:parenthesis]:  # a variable
            return self.find(begin, end, ";") + 1
        name = parenthesis - 1
        while name > begin and self.tokens[name - 1] in ("::", "~", "operator"):
            name -= 1 + (self.tokens[name - 1] == "::" and re.match(r"\w", self.tokens[name - 2]) is not None)
        # Members may be initialised in braces before the body.
        body, beside = brace, {"const", "noexcept", "override", "final", "try", ")", "&", "&&"}
        colon = self.find(self.partner[parenthesis], brace, ":", "->")
        if colon != brace and self.tokens[colon] == ":":
            while self.tokens[body - 1] not in CLOSES or self.tokens[self.partner[body] + 1] in (",", "{"):
                body = self.find(self.partner[body] + 1, end, "{")
        elif self.tokens[body - 1] not in beside and colon == brace:
            return self.find(begin, end, ";") + 1
        self.function = inside + "".join(self.tokens[name:parenthesis])
        self.early_return(begin, name, body)
        self.expression(parenthesis, body, "")
        self.block(body)
        self.function = ""
        return self.partner[body] + 1

    def end_of_template(self, i):
        """Behind the brackets <...> that begin at token i."""
        depth = 0
        while True:
            depth += {"<": 1, ">": -1}.get(self.tokens[i], 0)
            i += 1
            if depth == 0:
                return i

    def early_return(self, begin, name, body):
        kind = [t for t in self.tokens[begin:name] if t not in ("static", "inline", "virtual", "constexpr", "friend")]
        if self.partner[body] == body + 1 or "auto" in kind or (kind and kind[-1] == "&"):
            return
        for value in [""] if kind in ([], ["void"]) else [" true", " false"] if kind == ["bool"] else [" {}"]:
            self.add("return", "", body + 1, body + 1, f"return{value}; ")

    # Statements. Each returns where what follows begins.

    def block(self, brace):
        i = brace + 1
        while i < self.partner[brace]:
            i = self.statement(i)

    def statement(self, i, is_sole=False):
        """`is_sole`: it is all that an `if` or a loop does, which has a mutant without it already."""
        token, end = self.tokens[i], len(self.tokens)
        if token == "{":
            self.block(i)
            return self.partner[i] + 1
        if token in ("if", "while", "switch", "for"):
            return self.with_head(i)
        if token in ("else", "do", "try"):
            return self.statement(i + 1)
        if token == "catch":
            return self.statement(self.partner[i + 1] + 1)
        if token in ("case", "default"):
            return self.find(i, end, ":") + 1
        if token in CLASSES:
            return self.definition(i, self.find(i, end, "{", ";"), end, self.function + "::") + 1
        stop = self.find(i, end, ";")
        words = self.words(i, stop)
        if LEFT_ALONE.match(token):
            return stop + 1
        if CHECK.match(token):
            self.add("delete", words, i, stop + 1, ";")
            self.expression(i + 2, self.find(i + 2, self.partner[i + 1], ","), words)
            return stop + 1
        if self.can_go(i, stop) and not is_sole:
            self.add("delete", words, i, stop + 1, ";")
        elif self.is_guard(i, stop):
            self.add("delete", words, i, stop + 1, ";")
        self.expression(i, stop, words)
        return stop + 1

    def is_guard(self, begin, end):
        """Whether it declares an object that nobody names: it is there for what its constructor and destructor do."""
        name = self.find(begin, end, "(", "{", "=") - 1
        if name <= begin or not self.tokens[name].isidentifier() or self.tokens[name + 1] == "=":
            return False
        if re.search(r"\b\w+_lock\b|\block_guard\b|\breturn\b", self.words(begin, name)):  # ThreadSanitizer sees those
            return False
        after = end
        while self.tokens[after] not in CLOSES:  # to the end of its block
            after = self.partner[after] + 1 if self.tokens[after] in OPENS else after + 1
        return self.tokens[name] not in self.tokens[end:after]

    def with_head(self, i):
        """An `if`, a `while`, a `switch` or a `for`."""
        token = self.tokens[i]
        head = i + 1 + (self.tokens[i + 1] == "constexpr")
        end = self.partner[head]
        words = self.words(i, end + 1)
        condition = self.find(head + 1, end, ";") + 1
        named = condition > end  # it has no declaration of its own before the condition
        condition = head + 1 if named else condition
        if head == i + 1 and token in ("if", "while"):
            if named and self.find(condition, end, "=") != end:  # it declares what it tests
                self.add("never", words, end, end, "; false")
            else:
                self.wrap("never", words, condition, end, "false && (", ")")
                if token == "if":
                    self.wrap("always", words, condition, end, "true || (", ")")
        self.expression(head + 1, end, words)
        after = self.statement(end + 1, is_sole=True)
        if token == "for":
            self.add("delete", words, i, after, ";")
        return after

    def wrap(self, operator, words, begin, end, before, behind):
        source = self.source[self.at[begin] : self.end_of(end - 1)]
        self.add(operator, words, begin, end, before + source + behind)

    def can_go(self, begin, end):
        """Whether it is a call or an assignment, not a declaration."""
        first = self.tokens[begin]
        if first in ("return", "break", "continue", "delete", "auto", "const", "static", "constexpr", "co_return"):
            return False
        if self.tokens[end - 1] == ")" and self.tokens[self.partner[end - 1] - 1] == "reserve":
            return False
        until = self.find(begin, end, "=")
        i = begin
        while i < until:  # two words behind each other, or a type's `*`, `&` or `>` and a word: a declaration
            i = self.partner.get(i, i) + 1 if self.tokens[i] in OPENS else i + 1
            if i < until and self.source[self.end_of(i - 1) : self.at[i]].isspace() and self.tokens[i][0].isidentifier():
                before = self.tokens[i - 1]
                if before[-1].isalnum() or before[-1] == "_" or (before in ("*", "&", ">") and not self.is_binary(i - 1)):
                    return False
        return until != end or self.tokens[end - 1] in (")", "++", "--") or first in ("++", "--") or any(
            re.fullmatch(r"[-+*/%&|^]=|<<=", t) for t in self.tokens[begin:end]
        )

    def is_binary(self, i):
        """Whether there are blanks on both sides of token i, as beside operators and not in types."""
        return self.source[self.at[i] - 1].isspace() and self.source[self.end_of(i)].isspace()

    # Expressions, and the blocks of lambdas in them.

    def expression(self, begin, end, words):
        i = begin
        while i < end:
            token = self.tokens[i]
            if token == "{" and self.is_lambda(i):
                self.block(i)
                i = self.partner[i]
            elif CHECK.match(token) and self.tokens[i + 1] == "(":
                i = self.partner[i + 1]
            elif token in ("&&", "||") and self.is_binary(i):
                self.drop_operands(i, words)
            elif token == "?":
                first = self.begin_of_operand(i, AROUND_OPERANDS)
                self.wrap("negate", words, first, i, "!(", ")")
            elif token in ("<", "<=", ">", ">=") and self.is_binary(i):
                self.add("bound", words, i, i + 1, OTHER[token])
            elif token in ("==", "!=") and self.is_binary(i):
                self.add("negate", words, i, i + 1, OTHER[token])
            elif token in ("true", "false"):
                self.add("bool", words, i, i + 1, OTHER[token])
            elif token in ("+", "-") and self.is_binary(i) and self.tokens[i + 1] == "1":
                self.add("off-by-one", words, i, i + 2, "")
            elif token in ("clone", "contiguous", "to") and self.tokens[i - 1] == "." and self.tokens[i + 1] == "(":
                self.add("drop-call", words, i - 1, self.partner[i + 1] + 1, "")
            elif token == "exchange" and self.tokens[i + 1] == "(":
                self.exchange(i, words)
            i += 1

    def is_lambda(self, brace):
        i = brace - 1
        while re.match(r"[\w:<>&*]|->", self.tokens[i]) and self.tokens[i] != "return":
            i -= 1
        if self.tokens[i] == ")":
            i = self.partner[i] - 1
        return self.tokens[i] == "]" and not re.match(r"[\w)\]]", self.tokens[self.partner[i] - 1]) or (
            self.tokens[i] == "]" and self.tokens[self.partner[i] - 1] == "return"
        )

    def begin_of_operand(self, i, stops):
        while self.tokens[i - 1] not in stops and self.tokens[i - 1] not in OPENS:
            i = self.partner[i - 1] if self.tokens[i - 1] in CLOSES else i - 1
        return i

    def drop_operands(self, i, words):
        stops = AROUND_OPERANDS | ({"||"} if self.tokens[i] == "||" else {"&&", "||"})
        first, last = self.begin_of_operand(i, stops), i + 1
        while self.tokens[last] not in stops and self.tokens[last] not in CLOSES:
            last = self.partner[last] + 1 if self.tokens[last] in OPENS else last + 1
        self.add("drop-operand", f"{words} {self.words(first, i)}", first, i + 1, "")
        self.add("drop-operand", f"{words} {self.words(i + 1, last)}", i, last, "")

    def exchange(self, i, words):
        comma = self.find(i + 2, self.partner[i + 1], ",")
        first = i - 2 if self.tokens[i - 1] == "::" else i
        kept = self.source[self.at[i + 2] : self.end_of(comma - 1)]
        self.add("exchange", words, first, self.partner[i + 1] + 1, kept)


def mutants_of(file, source):
    return Parser(file, source).mutants
