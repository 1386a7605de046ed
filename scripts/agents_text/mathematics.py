"""Documents of the kind ``mathematics``: exercises with every step, solved in exact numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import combinations, pairwise

from scripts.agents_text.documents import Document, filled, sizes
from scripts.agents_text.repository import Repository

_NAMES = (
    "Ada",
    "Bela",
    "Chidi",
    "Dunya",
    "Emre",
    "Fumi",
    "Greta",
    "Hana",
    "Ilan",
    "Jaro",
    "Keita",
    "Lale",
    "Mirek",
    "Nour",
    "Oona",
    "Pavel",
)
_CHECKS = (
    "A check is cheap here, so we make it.", "Before we move on, test the result.", "Does this agree with the question? Put it in and see.",
    "It costs one line to be sure.", "Let us not trust the arithmetic blindly.", "The other direction confirms it.", "Now the proof of the pudding.",
)  # fmt: skip
_STEPS = ("First", "To begin", "We start here", "Step one", "At the outset")
_NEXT = ("Next", "Then", "After that", "Now", "In the following step", "So", "Continuing", "From there")


def _polynomial(coefficients: list[int], name: str = "x") -> str:
    terms = []
    for power in range(len(coefficients) - 1, -1, -1):
        value = coefficients[power]
        if value:
            head = "" if abs(value) == 1 and power else str(abs(value))
            tail = "" if not power else name if power == 1 else f"{name}^{power}"
            terms.append((" - " if value < 0 else " + ") + head + tail)
    text = "".join(terms) or " + 0"
    return text[3:] if text.startswith(" + ") else "-" + text[3:]


def _long_division(o: random.Random) -> str:
    divisor, dividend = o.randint(7, 97), o.randint(20_000, 9_999_999)
    lines = [
        o.choice(
            (
                f"Divide {dividend} by {divisor} by hand.",
                f"How often does {divisor} go into {dividend}, and what is left over?",
                f"Long division: {dividend} : {divisor}.",
            )
        )
    ]
    rest, digits = 0, ""
    for place, digit in enumerate(str(dividend), 1):
        rest = rest * 10 + int(digit)
        times = rest // divisor
        if times or digits:
            lines.append(
                f"  digit {place}: bring down {digit}, which gives {rest}; {divisor} x {times} = {times * divisor}; {rest} - {times * divisor} = {rest - times * divisor}."
            )
            digits += str(times)
        else:
            lines.append(f"  digit {place}: {rest} is less than {divisor}, so take another digit.")
        rest -= times * divisor
    lines.append(
        f"The quotient is {digits or 0} and the remainder {rest}. {o.choice(_CHECKS)} {divisor} x {digits or 0} + {rest} = {divisor * int(digits or 0) + rest}."
    )
    return "\n".join(lines)


def _system(o: random.Random) -> str:
    n = o.choice((2, 3, 3, 4))
    x = [Fraction(o.randint(-9, 9), o.choice((1, 1, 2, 3))) for _ in range(n)]
    rows = [[Fraction(o.randint(-7, 7)) for _ in range(n)] for _ in range(n)]
    rows = [[*row, sum((a * b for a, b in zip(row, x, strict=True)), Fraction(0))] for row in rows]
    names = "xyzw"[:n]

    def show(row: list[Fraction]) -> str:
        return " ".join(f"{value!s:>8}" for value in row[:-1]) + f"  | {row[-1]}"

    lines = [
        o.choice(
            (
                "Solve the linear system whose augmented matrix is",
                "Eliminate to find all unknowns of",
                "Bring this system to triangular form and solve it:",
            )
        ),
        *map(show, rows),
    ]
    for column in range(n):
        pivot = next((r for r in range(column, n) if rows[r][column]), None)
        if pivot is None:
            return ""
        if pivot != column:
            rows[column], rows[pivot] = rows[pivot], rows[column]
            lines.append(
                f"The entry in row {column + 1}, column {column + 1} is zero, so rows {column + 1} and {pivot + 1} change places."
            )
        for r in range(column + 1, n):
            factor = rows[r][column] / rows[column][column]
            if factor:
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[column], strict=True)]
                lines.append(f"{o.choice(_NEXT)}, row {r + 1} minus {factor} times row {column + 1}:")
                lines.append(show(rows[r]))
    for r in range(n - 1, -1, -1):
        known = " ".join(f"- ({rows[r][c]})({x[c]})" for c in range(r + 1, n))
        lines.append(
            f"Row {r + 1} gives {names[r]} = ({rows[r][n]} {known}) / ({rows[r][r]}) = {x[r]}.".replace(" )", ")")
        )
    return "\n".join(lines)


def _euclid(o: random.Random) -> str:
    a, b = o.randint(300, 99999), o.randint(200, 9999)
    lines = [
        o.choice(
            (
                f"Find the greatest common divisor of {a} and {b}, and write it as a combination of the two.",
                f"Extended Euclidean algorithm for ({a}, {b}).",
            )
        )
    ]
    r0, r1, s0, s1, t0, t1 = a, b, 1, 0, 0, 1
    while r1:
        q = r0 // r1
        lines.append(
            f"  {r0} = {q} x {r1} + {r0 - q * r1}; the new coefficients are {s0} - {q} x ({s1}) = {s0 - q * s1} and {t0} - {q} x ({t1}) = {t0 - q * t1}."
        )
        r0, r1, s0, s1, t0, t1 = r1, r0 - q * r1, s1, s0 - q * s1, t1, t0 - q * t1
    lines.append(
        f"The last remainder that is not zero is {r0}. Indeed {s0} x {a} + ({t0}) x {b} = {s0 * a} + ({t0 * b}) = {r0}."
    )
    if r0 == 1:
        lines.append(
            f"The numbers are coprime, so the inverse of {a % b} modulo {b} is {s0 % b}: {a % b} x {s0 % b} = {a % b * (s0 % b)} = {a % b * (s0 % b) // b} x {b} + 1."
        )
    return "\n".join(lines)


def _power(o: random.Random) -> str:
    base, exponent, modulus = (
        o.randint(2, 60),
        o.randint(50, 5000),
        o.choice((101, 97, 1009, 561, 343, 221, 1001, 7919)),
    )
    bits = bin(exponent)[2:]
    lines = [f"Compute {base}^{exponent} modulo {modulus} by repeated squaring. In binary the exponent is {bits}."]
    value = 1
    for bit in bits:
        square = value * value
        text = f"  square: {value}^2 = {square}, which leaves {square % modulus}"
        value = square % modulus
        if bit == "1":
            text += f"; the bit is 1, so multiply by {base}: {value * base} leaves {value * base % modulus}"
            value = value * base % modulus
        lines.append(text + ".")
    lines.append(
        f"So {base}^{exponent} = {value} (mod {modulus}). "
        + o.choice(
            (
                f"Only {len(bits)} squarings were needed instead of {exponent - 1} products.",
                "No number on the way was larger than the modulus squared.",
                f"An independent computation gives {pow(base, exponent, modulus)} as well.",
            )
        )
    )
    return "\n".join(lines)


def _derivative(o: random.Random) -> str:
    coefficients = [o.randint(-9, 9) for _ in range(o.randint(4, 6))]
    coefficients[-1] = coefficients[-1] or 3
    at = o.randint(-3, 4)
    first = [power * value for power, value in enumerate(coefficients)][1:]
    second = [power * value for power, value in enumerate(first)][1:]
    at_f = [sum(value * at**power for power, value in enumerate(c)) for c in (coefficients, first, second)]
    lines = [
        f"Let f(x) = {_polynomial(coefficients)}. {o.choice(('Find the tangent at', 'Describe the graph near', 'Give value, slope and bend at'))} x = {at}."
    ]
    lines += [
        f"  the term {value}x^{power} becomes {power} x {value} x^{power - 1} = {power * value}x^{power - 1}"
        for power, value in enumerate(coefficients)
        if power > 1 and value
    ]
    lines.append(f"Together f'(x) = {_polynomial(first)}, and once more f''(x) = {_polynomial(second)}.")
    lines.append("The value by Horner's scheme:")
    total = 0
    for value in reversed(coefficients):
        lines.append(f"  {total} x ({at}) + ({value}) = {total * at + value}")
        total = total * at + value
    bend = "upwards" if at_f[2] > 0 else "downwards" if at_f[2] < 0 else "neither way at this point"
    lines.append(
        f"f({at}) = {at_f[0]}, f'({at}) = {at_f[1]}, f''({at}) = {at_f[2]}. The tangent is y = {at_f[1]}(x - ({at})) + ({at_f[0]}) = {at_f[1]}x + ({at_f[0] - at_f[1] * at}); the graph bends {bend}."
    )
    return "\n".join(lines)


def _integral(o: random.Random) -> str:
    coefficients = [o.randint(-6, 6) for _ in range(o.randint(3, 5))]
    coefficients[-1] = coefficients[-1] or 2
    low = o.randint(-3, 1)
    high = low + o.randint(1, 4)
    parts = [Fraction(value, power + 1) for power, value in enumerate(coefficients)]
    values = [sum((c * Fraction(x) ** (power + 1) for power, c in enumerate(parts)), Fraction(0)) for x in (low, high)]
    lines = [
        f"{o.choice(('Integrate', 'Find the signed area under', 'Evaluate the definite integral of'))} {_polynomial(coefficients)} from {low} to {high}."
    ]
    lines += [
        f"  an antiderivative of {value}x^{power} is ({parts[power]})x^{power + 1}"
        for power, value in enumerate(coefficients)
        if value
    ]
    lines.append(
        f"At {high} the antiderivative is {values[1]}, at {low} it is {values[0]}. The integral is {values[1]} - ({values[0]}) = {values[1] - values[0]}."
    )
    n = o.choice((4, 6))
    h = Fraction(high - low, n)
    f = [
        sum((value * (low + i * h) ** power for power, value in enumerate(coefficients)), Fraction(0))
        for i in range(n + 1)
    ]
    trapezoid = h * (f[0] / 2 + sum(f[1:-1], Fraction(0)) + f[-1] / 2)
    lines.append(
        f"For comparison the trapezoidal rule with {n} strips of width {h} takes the values {', '.join(map(str, f))} and gives {trapezoid} (error {trapezoid - (values[1] - values[0])})."
    )
    return "\n".join(lines)


def _quadratic(o: random.Random) -> str:
    a, b, c = o.choice((1, 1, 2, 3, -1, 5)), o.randint(-14, 14), o.randint(-20, 20)
    d = b * b - 4 * a * c
    lines = [
        f"Solve {_polynomial([c, b, a])} = 0. {o.choice(('Complete the square.', 'Use the discriminant.', 'Say first how many real roots there are.'))}"
    ]
    lines.append(f"The discriminant is ({b})^2 - 4 x ({a}) x ({c}) = {b * b} - ({4 * a * c}) = {d}.")
    half = Fraction(b, 2 * a)
    lines.append(f"With p/2 = {half} the left side is {a}[(x + ({half}))^2 - ({half * half - Fraction(c, a)})].")
    if d < 0:
        lines.append(
            "It is negative, so no real number solves the equation; the parabola stays on one side of the axis."
        )
    elif math.isqrt(d) ** 2 == d:
        roots = sorted({Fraction(-b + s * math.isqrt(d), 2 * a) for s in (1, -1)})
        lines.append(
            f"It is the square of {math.isqrt(d)}, so the roots are rational: {' and '.join(map(str, roots))}. Their sum should be {Fraction(-b, a)} and their product {Fraction(c, a)}."
        )
    else:
        low = math.isqrt(d)
        x = Fraction(low)
        lines.append(
            f"It lies between {low}^2 and {low + 1}^2, so the roots are irrational. Newton's method for its root, from {low}:"
        )
        for step in range(3):
            x = (x + d / x) / 2
            x = x.limit_denominator(10**6)
            lines.append(f"  step {step + 1}: {x} = {float(x):.8f}, squared {float(x * x):.8f}")
        lines.append(f"The roots are about {(-b - float(x)) / (2 * a):.6f} and {(-b + float(x)) / (2 * a):.6f}.")
    return "\n".join(lines)


def _factor(o: random.Random) -> str:
    number = o.randint(2_000, 400_000)
    rest, found = number, []
    lines = [f"{o.choice(('Factor', 'Write as a product of primes:', 'Find all prime factors of'))} {number}."]
    p = 2
    while p * p <= rest:
        while rest % p == 0:
            lines.append(f"  {rest} / {p} = {rest // p}")
            found.append(p)
            rest //= p
        p += 1 if p == 2 else 2
    if rest > 1:
        found.append(rest)
        lines.append(f"  no prime up to {math.isqrt(rest)} divides {rest}, so it is prime")
    exponents = {p: found.count(p) for p in found}
    product = " x ".join(f"{p}^{k}" if k > 1 else str(p) for p, k in exponents.items())
    divisors = math.prod(k + 1 for k in exponents.values())
    phi = math.prod(p ** (k - 1) * (p - 1) for p, k in exponents.items())
    sigma = math.prod((p ** (k + 1) - 1) // (p - 1) for p, k in exponents.items())
    lines.append(
        f"{number} = {product}. It has {divisors} divisors; their sum is {sigma}; {phi} smaller numbers are coprime to it."
    )
    return "\n".join(lines)


def _induction(o: random.Random) -> str:
    k = o.choice((1, 2, 3))
    a, b = o.randint(2, 9), o.randint(1, 9)
    n = o.randint(5, 12)
    kind = o.randrange(3)
    if kind == 0:
        lines = [f"Claim: for all n >= 1 the sum of {a}i + {b} for i from 1 to n is S(n) = {a}n(n + 1)/2 + {b}n."]
        lines.append(f"Base case. For n = 1 the sum is {a + b}, and S(1) = {a} + {b} = {a + b}.")
        lines.append(
            f"Step. Suppose the claim holds for n. Then the sum up to n + 1 is S(n) + {a}(n + 1) + {b} = {a}(n + 1)(n/2 + 1) + {b}(n + 1) = {a}(n + 1)(n + 2)/2 + {b}(n + 1) = S(n + 1)."
        )
        lines.append(
            "A table to look at: " + ", ".join(f"S({i}) = {a * i * (i + 1) // 2 + b * i}" for i in range(1, n)) + "."
        )
    elif kind == 1:
        lines = [f"Claim: {a + 1}^n - 1 is a multiple of {a} for every n >= 0."]
        lines.append(
            f"For n = 0 it is 0 = 0 x {a}. If {a + 1}^n - 1 = {a}m, then {a + 1}^(n+1) - 1 = {a + 1}({a}m + 1) - 1 = {a}({a + 1}m + 1), which is again a multiple."
        )
        m = 0
        for i in range(n):
            lines.append(f"  n = {i}: {(a + 1) ** i} - 1 = {a} x {m}")
            m = (a + 1) * m + 1
    else:
        lines = [f"Let u(0) = {b} and u(n+1) = {a}u(n) + {k}. Guess a closed form and prove it."]
        u = [b]
        for i in range(n - 1):
            u.append(a * u[-1] + k)
            lines.append(f"  u({i + 1}) = {a} x {u[-2]} + {k} = {u[-1]}")
        shift = Fraction(k, a - 1)
        lines.append(
            f"The fixed point solves c = {a}c + {k}, so c = {-shift}. Set v = u + {shift}: then v(n+1) = {a}v(n), hence u(n) = ({b + shift}) x {a}^n - {shift}."
        )
        lines.append(f"For n = {n - 1} the formula gives {(b + shift) * a ** (n - 1) - shift}, as the table does.")
    return "\n".join(lines)


def _counting(o: random.Random) -> str:
    n, k = o.randint(6, 14), o.randint(2, 5)
    who = o.choice(_NAMES)
    kind = o.randrange(3)
    if kind == 0:
        text = f"{who} has {n} books and takes {k} on a journey. In how many ways, if the order in the bag does not matter? If it does?"
        lines = [
            text,
            f"In order there are {' x '.join(str(n - i) for i in range(k))} = {math.perm(n, k)} choices. Each set was counted {k}! = {math.factorial(k)} times, so {math.perm(n, k)} / {math.factorial(k)} = {math.comb(n, k)} sets.",
        ]
        lines.append(
            f"Pascal's rule agrees: sets with the first book {math.comb(n - 1, k - 1)}, sets without it {math.comb(n - 1, k)}, together {math.comb(n, k)}."
        )
    elif kind == 1:
        m = o.randint(3, 6)
        numbers = sorted(o.sample(range(1, 20), m))
        target = o.randint(20, 45)
        hits = [c for r in range(1, m + 1) for c in combinations(numbers, r) if sum(c) == target]
        lines = [
            f"Which subsets of {{{', '.join(map(str, numbers))}}} have the sum {target}?",
            f"There are 2^{m} - 1 = {2**m - 1} subsets that are not empty. The total is {sum(numbers)}, so a subset fits when the rest of the numbers has the sum {sum(numbers) - target}.",
        ]
        lines.append(
            "They are: "
            + ("; ".join(" + ".join(map(str, c)) for c in hits) if hits else "none at all")
            + f". Number of hits: {len(hits)}."
        )
    else:
        a, b, c = o.randint(2, 5), o.randint(3, 7), o.randint(2, 11)
        top = o.randint(100, 900)

        def f(*d: int) -> int:
            return top // math.lcm(*d)

        union = f(a) + f(b) + f(c) - f(a, b) - f(a, c) - f(b, c) + f(a, b, c)
        lines = [
            f"How many numbers from 1 to {top} are divisible by {a}, {b} or {c}?",
            f"Multiples of one: {f(a)}, {f(b)}, {f(c)}. Multiples of two at once: {f(a, b)} (of {math.lcm(a, b)}), {f(a, c)} (of {math.lcm(a, c)}), {f(b, c)} (of {math.lcm(b, c)}). Of all three: {f(a, b, c)}.",
        ]
        lines.append(
            f"Inclusion and exclusion: {f(a)} + {f(b)} + {f(c)} - {f(a, b)} - {f(a, c)} - {f(b, c)} + {f(a, b, c)} = {union}; {top - union} numbers are divisible by none."
        )
    return "\n".join(lines)


def _statistics(o: random.Random) -> str:
    n = o.randint(6, 11)
    x = [o.randint(1, 40) for _ in range(n)]
    y = [o.randint(1, 3) * value + o.randint(-9, 9) for value in x]
    mean = [Fraction(sum(v), n) for v in (x, y)]
    sxx = sum((v - mean[0]) ** 2 for v in x)
    syy = sum((v - mean[1]) ** 2 for v in y)
    sxy = sum((p - mean[0]) * (q - mean[1]) for p, q in zip(x, y, strict=True))
    if not sxx or not syy:
        return ""
    what = o.choice(
        (
            "hours of study and points",
            "age of a tree and its girth",
            "length of a prompt and seconds",
            "price and pieces sold",
            "rain and the height of a river",
        )
    )
    lines = [
        f"{o.choice(_NAMES)} noted pairs ({what}): "
        + ", ".join(f"({p}, {q})" for p, q in zip(x, y, strict=True))
        + ". Fit a line."
    ]
    lines.append(
        f"The means are {mean[0]} and {mean[1]}. In order the first values are {', '.join(map(str, sorted(x)))}; their median is {Fraction(sorted(x)[(n - 1) // 2] + sorted(x)[n // 2], 2)}."
    )
    lines += [
        f"  {p} - {mean[0]} = {p - mean[0]};  {q} - {mean[1]} = {q - mean[1]};  product {(p - mean[0]) * (q - mean[1])}"
        for p, q in zip(x, y, strict=True)
    ]
    slope = sxy / sxx
    lines.append(
        f"The sum of products is {sxy}, the sum of squares {sxx}. The slope is {slope} = {float(slope):.4f}, the intercept {float(mean[1] - slope * mean[0]):.4f}; the correlation is {float(sxy) / math.sqrt(float(sxx * syy)):.4f}; the sample variance of the first values {float(sxx / (n - 1)):.4f}."
    )
    return "\n".join(lines)


def _probability(o: random.Random) -> str:
    kind = o.randrange(3)
    if kind == 0:
        prior, hit, false = (
            Fraction(o.randint(1, 20), 100),
            Fraction(o.randint(80, 99), 100),
            Fraction(o.randint(1, 15), 100),
        )
        both = prior * hit
        other = (1 - prior) * false
        what = o.choice(
            ("A smoke sensor", "A test for a plant disease", "A filter for unwanted mail", "A check of parts on a belt")
        )
        lines = [
            f"{what} responds in {hit} of the cases that it should find and in {false} of the others. The share of real cases is {prior}. It responded. How likely is a real case?"
        ]
        lines.append(
            f"Real and found: {prior} x {hit} = {both}. Not real but found: {1 - prior} x {false} = {other}. Found in all: {both + other}."
        )
        lines.append(
            f"Bayes' rule: {both} / {both + other} = {both / (both + other)}, about {float(both / (both + other)):.3f}. After a second independent response it is {float(both * hit / (both * hit + other * false)):.3f}."
        )
    elif kind == 1:
        n, p = o.randint(4, 8), Fraction(1, o.randint(2, 6))
        lines = [
            f"An event has probability {p}. It is tried {n} times. Give the whole distribution of the number of successes."
        ]
        lines += [
            f"  P({i}) = C({n},{i}) x ({p})^{i} x ({1 - p})^{n - i} = {math.comb(n, i) * p**i * (1 - p) ** (n - i)}"
            for i in range(n + 1)
        ]
        lines.append(
            f"They add up to 1. The mean is {n * p}, the variance {n * p * (1 - p)}; at least one success has probability {1 - (1 - p) ** n}."
        )
    else:
        sides = o.choice((4, 6, 8, 10))
        target = o.randint(sides, 2 * sides - 1)
        pairs = [(i, target - i) for i in range(1, sides + 1) if 1 <= target - i <= sides]
        lines = [
            f"Two fair dice with {sides} sides are thrown. What is the probability of the sum {target}, and of at least that sum?"
        ]
        at_least = sum(i + j >= target for i in range(1, sides + 1) for j in range(1, sides + 1))
        lines.append(
            f"The pairs are {', '.join(map(str, pairs))}: {len(pairs)} of {sides**2}, so {Fraction(len(pairs), sides**2)}. At least {target} happens in {at_least} pairs: {Fraction(at_least, sides**2)}."
        )
    return "\n".join(lines)


def _matrix(o: random.Random) -> str:
    n = o.choice((2, 3))
    a, b = ([[o.randint(-6, 8) for _ in range(n)] for _ in range(n)] for _ in range(2))
    lines = [f"Multiply A = {a} and B = {b}, and compare the determinants."]
    c = [[sum(a[i][k] * b[k][j] for k in range(n)) for j in range(n)] for i in range(n)]
    lines += [
        f"  row {i + 1} times column {j + 1}: "
        + " + ".join(f"({a[i][k]})({b[k][j]})" for k in range(n))
        + f" = {c[i][j]}"
        for i in range(n)
        for j in range(n)
    ]

    def det(m: list[list[int]]) -> int:
        return (
            m[0][0]
            if len(m) == 1
            else sum((-1) ** j * m[0][j] * det([row[:j] + row[j + 1 :] for row in m[1:]]) for j in range(len(m)))
        )

    lines.append(
        f"So AB = {c}. det A = {det(a)}, det B = {det(b)}, det AB = {det(c)} = {det(a)} x {det(b)}. The trace of AB is {sum(c[i][i] for i in range(n))}, and that of BA is the same."
    )
    return "\n".join(lines)


def _base(o: random.Random) -> str:
    number, base = o.randint(300, 999_999), o.choice((2, 3, 5, 7, 8, 12, 16))
    digits, rest = [], number
    lines = [f"Write {number} in base {base}."]
    while rest:
        lines.append(f"  {rest} = {rest // base} x {base} + {rest % base}")
        digits.append("0123456789abcdef"[rest % base])
        rest //= base
    text = "".join(reversed(digits))
    lines.append(
        f"Read upwards: {text}. Back again: "
        + " + ".join(f"{int(d, 16)} x {base**p}" for p, d in enumerate(digits))
        + f" = {number}."
    )
    return "\n".join(lines)


def _fractions(o: random.Random) -> str:
    parts = [Fraction(o.randint(1, 30), o.randint(2, 40)) for _ in range(o.randint(3, 5))]
    common = math.lcm(*(p.denominator for p in parts))
    total = sum(parts, Fraction(0))
    lines = [f"Add {' + '.join(map(str, parts))} {o.choice(('and reduce', 'by hand', 'without a calculator'))}."]
    lines.append(
        f"The denominators {', '.join(str(p.denominator) for p in parts)} have the least common multiple {common}."
    )
    lines += [f"  {p} = {p.numerator * (common // p.denominator)}/{common}" for p in parts]
    lines.append(
        f"The numerators add up to {total * common}. {total * common}/{common} = {total}, or {float(total):.5f}. As a continued fraction it is {_continued(total)}."
    )
    return "\n".join(lines)


def _continued(value: Fraction) -> str:
    terms = []
    while True:
        whole = value.numerator // value.denominator
        terms.append(str(whole))
        if value == whole:
            return "[" + "; ".join([terms[0], ", ".join(terms[1:])]) + "]" if terms[1:] else f"[{terms[0]}]"
        value = 1 / (value - whole)


def _motion(o: random.Random) -> str:
    one, two = o.sample(_NAMES, 2)
    v, w, d = o.randint(40, 130), o.randint(30, 110), o.randint(60, 700)
    head = Fraction(o.choice((15, 20, 30, 40, 45, 90)), 60)
    rest = d - v * head
    if rest <= 0:
        return ""
    t = rest / (v + w)
    return (
        f"{one} leaves the harbour at {v} km per hour; {two} leaves a town {d} km away {head} hours later at {w} km per hour, towards {one}. Where and when do they meet?\n"
        f"In {head} hours {one} covers {v} x {head} = {v * head} km, so {rest} km remain between them. They close this gap at {v} + {w} = {v + w} km per hour, which takes {rest} / {v + w} = {t} hours, about {float(t * 60):.1f} minutes.\n"
        f"{one} has then covered {v * (head + t)} km ({float(v * (head + t)):.2f}), {two} {w * t} km ({float(w * t):.2f}); together {v * (head + t) + w * t} km, as it must be."
    )


def _interest(o: random.Random) -> str:
    amount, rate, years = o.randint(5, 90) * 100, Fraction(o.randint(5, 60), 10), o.randint(4, 9)
    extra = o.choice((0, 100, 250, -150))
    lines = [
        f"{o.choice(_NAMES)} puts {amount} into an account with {float(rate)} percent a year"
        + (f" and {'adds' if extra > 0 else 'takes out'} {abs(extra)} at each year's end." if extra else ".")
        + " Follow the account in exact cents."
    ]
    cents = amount * 100
    for year in range(1, years + 1):
        gain = round(cents * rate / 100)
        cents += gain + extra * 100
        lines.append(
            f"  year {year}: interest {gain / 100:.2f}"
            + (f", then {extra:+d}" if extra else "")
            + f", balance {cents / 100:.2f}"
        )
    doubling = math.log(2) / math.log(1 + float(rate) / 100)
    lines.append(
        f"Without payments a sum doubles after ln 2 / ln {1 + float(rate) / 100:.4g} = {doubling:.2f} years; the rule of 72 says {72 / float(rate):.2f}."
    )
    return "\n".join(lines)


def _logic(o: random.Random) -> str:
    forms: dict[str, Callable[[bool, bool, bool], bool]] = {
        "(p and q) or not r": lambda p, q, r: (p and q) or not r, "p implies (q or r)": lambda p, q, r: not p or q or r,
        "not (p or q) == (not p and not q)": lambda p, q, r: (not (p or q)) == (not p and not q), "(p xor q) xor r": lambda p, q, r: p ^ q ^ r,
        "(p implies q) and (q implies r)": lambda p, q, r: (not p or q) and (not q or r), "p == (q and not r)": lambda p, q, r: p == (q and not r),
    }  # fmt: skip
    name = o.choice(list(forms))
    rows = [(p, q, r) for p in (True, False) for q in (True, False) for r in (True, False)]
    o.shuffle(rows)
    lines = [f"Fill in the truth table of {name}; the rows come in no order."]
    lines += [
        f"  p {'T' if p else 'F'}  q {'T' if q else 'F'}  r {'T' if r else 'F'}  ->  {'T' if forms[name](p, q, r) else 'F'}"
        for p, q, r in rows
    ]
    true = sum(bool(forms[name](*row)) for row in rows)
    lines.append(
        f"It is true in {true} of 8 rows, " + ("so it is a tautology." if true == 8 else "so it depends on the values.")
    )
    return "\n".join(lines)


def _sequence(o: random.Random) -> str:
    c = [o.randint(-5, 9) for _ in range(o.randint(3, 4))]
    values = [sum(v * n**p for p, v in enumerate(c)) for n in range(1, 9)]
    lines = [
        f"A sequence begins {', '.join(map(str, values[:6]))}. {o.choice(('Which number comes next?', 'Find a polynomial that gives it.', 'Use differences to continue it.'))}"
    ]
    row = values[:6]
    depth = 0
    while len(row) > 1 and any(row):
        row = [b - a for a, b in pairwise(row)]
        depth += 1
        lines.append(f"  differences of order {depth}: {', '.join(map(str, row))}")
    lines.append(
        f"The differences vanish at order {depth}, so a polynomial of lower degree fits: a(n) = {_polynomial(c, 'n')}. Then a(7) = {values[6]} and a(8) = {values[7]}."
    )
    return "\n".join(lines)


def _geometry(o: random.Random) -> str:
    points = [(o.randint(-9, 12), o.randint(-9, 12)) for _ in range(o.randint(3, 6))]
    twice = 0
    lines = [
        f"Find area and perimeter of the closed path through {', '.join(map(str, points))} by the shoelace formula."
    ]
    length = 0.0
    for (x1, y1), (x2, y2) in zip(points, [*points[1:], points[0]], strict=True):
        twice += x1 * y2 - x2 * y1
        length += math.hypot(x2 - x1, y2 - y1)
        lines.append(
            f"  ({x1})({y2}) - ({x2})({y1}) = {x1 * y2 - x2 * y1}; this side squared is {(x2 - x1) ** 2 + (y2 - y1) ** 2}, its length {math.hypot(x2 - x1, y2 - y1):.4f}"
        )
    lines.append(
        f"The sum is {twice}, so the signed area is {Fraction(twice, 2)} ({'counter-clockwise' if twice > 0 else 'clockwise or crossing'}); the perimeter is {length:.4f}."
    )
    return "\n".join(lines)


def _remainders(o: random.Random) -> str:
    moduli = o.choice(([3, 5, 7], [4, 9, 11], [5, 8, 13], [7, 9, 16], [11, 13, 17]))
    rests = [o.randrange(m) for m in moduli]
    product = math.prod(moduli)
    lines = [
        "Find the smallest x >= 0 with "
        + ", ".join(f"x = {r} (mod {m})" for r, m in zip(rests, moduli, strict=True))
        + "."
    ]
    total = 0
    for r, m in zip(rests, moduli, strict=True):
        other = product // m
        inverse = pow(other, -1, m)
        total += r * other * inverse
        lines.append(
            f"  modulus {m}: the product of the others is {other}, its inverse modulo {m} is {inverse}; the part is {r} x {other} x {inverse} = {r * other * inverse}"
        )
    lines.append(
        f"The sum {total} leaves {total % product} modulo {product}. {o.choice(_CHECKS)} "
        + ", ".join(f"{total % product} = {total % product // m} x {m} + {total % product % m}" for m in moduli)
        + "."
    )
    return "\n".join(lines)


def _eigen(o: random.Random) -> str:
    a, b, c, d = (o.randint(-5, 7) for _ in range(4))
    trace, det = a + d, a * d - b * c
    disc = trace * trace - 4 * det
    lines = [f"Find the eigenvalues of [[{a}, {b}], [{c}, {d}]]."]
    lines.append(
        f"The trace is {trace}, the determinant {det}, so the characteristic polynomial is {_polynomial([det, -trace, 1], 't')} with discriminant {disc}."
    )
    if disc >= 0 and math.isqrt(disc) ** 2 == disc:
        for value in sorted({Fraction(trace + s * math.isqrt(disc), 2) for s in (1, -1)}):
            vector = (b, value - a) if b else (value - d, c)
            lines.append(
                f"  t = {value}: (A - tI) has the rows ({a - value}, {b}) and ({c}, {d - value}); "
                + (
                    f"a vector in its kernel is ({vector[0]}, {vector[1]})."
                    if any(vector)
                    else "the kernel contains an axis."
                )
            )
    elif disc > 0:
        lines.append(
            f"They are irrational: {(trace - math.sqrt(disc)) / 2:.5f} and {(trace + math.sqrt(disc)) / 2:.5f}."
        )
    else:
        lines.append(
            f"They are complex: {Fraction(trace, 2)} plus or minus i times {math.sqrt(-disc) / 2:.5f}. Their modulus is the root of {det}."
        )
    square = [[a * a + b * c, b * (a + d)], [c * (a + d), b * c + d * d]]
    lines.append(f"Cayley and Hamilton: the square {square} equals {trace} A - ({det}) I, entry by entry.")
    return "\n".join(lines)


_MAKERS: tuple[Callable[[random.Random], str], ...] = (
    _long_division, _system, _euclid, _power, _derivative, _integral, _quadratic, _factor, _induction, _counting, _statistics, _probability,
    _matrix, _base, _fractions, _motion, _interest, _logic, _sequence, _geometry, _remainders, _eigen,
)  # fmt: skip


def exercises(order: random.Random) -> Iterator[str]:
    """Yield numbered exercises with their solutions; kinds follow one another in an order that changes."""
    number = 0
    while True:
        for maker in order.sample(_MAKERS, len(_MAKERS)):
            text = maker(order)
            if text:
                number += 1
                yield f"{order.choice(('Exercise', 'Problem', 'Question', 'Task'))} {number}. {text}"


def build(repository: Repository, seed: int = 31) -> list[Document]:
    """Return the documents; each is of exercises of its own."""
    return [
        Document("mathematics", f"mathematics-{number:02}", filled(exercises(random.Random(f"{seed} {number}")), size))
        for number, size in enumerate(sizes(3), 1)
    ]
