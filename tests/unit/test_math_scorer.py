"""Which answers are the gold one, over the forms that GSM8K, AIME and MATH have, and those that a policy might try.

A table: the gold answer, what is equal to it, and what is not. In process: nothing here is slow or uses signals.
"""

# ruff: noqa: RUF001 - signs that look alike are what this is about
from __future__ import annotations

import pytest

from prorl_trio.tasks.handlers.final_answer import find_final_answer
from prorl_trio.tasks.handlers.math_scorer import score

TABLE = r"""
e
  = 2.718281828
  = e
  ! 2.7
18
  = 18
  = 18.0
  = **18**
  = __18__
  = `18`
  = 18 km/h
  = €18
  = $18
  = \$18
  = $18$
  = \(18\)
  = $18.00
  = 18.
  = 18 dollars
  = 18 dollars.
  = 18 dollars per day
  = Janet makes 18 dollars.
  = She makes a total of 18 dollars from her eggs.
  = She makes $18 every day.
  = The answer is 18.
  = The answer is: 18
  = The final answer is $\boxed{18}$.
  = Answer: 18
  = **Answer:** 18
  = **Final Answer: 18**
  = #### 18
  = 2 + 16 = 18\n#### 18
  = The answer is **18**
  = the answer is 18 dollars
  = 18\text{ dollars}
  = 18 \text{ km/h}
  = x = 18
  = = 18
  = 36/2
  = \frac{36}{2}
  = 18 eggs
  = 18%
  = The answer is 17. No, the answer is 18.
  = \boxed{17} \boxed{18}
  = 18km
  = 18 km / h
  = 18 m/s^2
  = 18 cents
  ! minus 18
  ! negative 18
  ! -18
  ! half of 18
  ! not 18
  ! 18 million
  ! 18 thousand
  ! 18k
  ! 18 dozen
  ! 18 or 19
  ! 18 and 19
  ! between 17 and 19
  ! between 18 and 19
  ! at least 18
  ! more than 18
  ! 18 or more
  ! 18 dollars and 19
  ! 18 dollars and 19 cents
  ! 18, 19
  ! 17, 18, 19
  ! {17, 18, 19}
  ! 18 or so 19
  ! not 17 but 18
  ! twice 18
  ! 18 squared
  ! 18 times 2
  ! the answer is not 18
  ! The answer is 18. No, the answer is 17.
  ! \boxed{18} \boxed{17}
  ! no idea
  ! ?
  = eighteen
  ! 18x
  ! x
  ! 1 8
  ! 180
  ! 18.5
  ! 1.8
  ! 81
  ! ±18
  ! \pm 18
  ! 18, 18
-18
  = minus 18
  = −18
  = negative 18
  = -18 degrees
  ! 18
18000000
  = 18 million
1500000
  = 1.5 million
  = $1.5 million
1,2
  = 1, 2
  = 1,2
  = 2, 1
  = 1 and 2
  ! 12
  ! 1.2
  ! 1
  ! 1,2,3
1, 2
  = 1,2
12
  ! 1,2
1.2
  ! 1,2
1,234
  = 1234
1234
  = 1,234
  = $1,234
  = 1,234 dollars
  = 1{,}234
  = 1\,234
  ! 1,23,4
  ! 12,34
  ! 1, 234
1234567
  = 1,234,567
  = 1,234,567.00
1000
  = 1 000
  = 1,000.0
1234.5
  = 1,234.5
(1,2)
  = (1, 2)
  ! (2, 1)
  ! [1, 2]
[0,1)
  = [0, 1)
  ! (0, 1)
(-\infty,3]
  = (-\infty, 3]
  = (-infinity, 3]
  = (-∞, 3]
(-\infty,-1)\cup(1,\infty)
  = (-∞,-1)∪(1,∞)
  = (1,\infty)\cup(-\infty,-1)
\{1,2\}
  = {1, 2}
\{1,2,3\}
  = \{3,2,1\}
  ! \{1,2\}
(1,2,3)
  = (1, 2, 3)
  ! (1, 3, 2)
\frac{1}{2}
  = 1/2
  = 1/2 cup
  = \frac{1}{2} cups
  ! 1/2 dozen
  ! 1/2 and a bit more
  = 0.5
  = .5
  = ½
  = \frac12
  = \dfrac{1}{2}
  ! 1/3
  ! 2/1
\frac{3}{2}
  = 1 1/2
  = 1\frac{1}{2}
  = 1.5
-\frac{3}{2}
  = -1 1/2
-\frac{1}{2}
  = -1/2
  ! 1/2
\frac{\sqrt{2}}{2}
  = \frac{1}{\sqrt{2}}
  = sqrt(2)/2
  = √2/2
2\sqrt{3}
  = 2*sqrt(3)
  = \sqrt{12}
  = 2√3
  ! 3\sqrt{2}
\sqrt[3]{2}
  = 2^{1/3}
2\pi
  = 2π
  = 2pi
  = 2*pi
  ! 6.28
\pi
  = 3.14159265
  ! 3.14
50\%
  = 50%
  = 0.5
  = 50 percent
  = 50
  ! 5%
50
  = 50%
1.2 \times 10^{3}
  = 1200
1200
  = 1.2e3
  = 1.2E3
  = 1.2 x 10^3
  = 1.2*10^3
  = 1.2 × 10³
  ! 1.2e4
0.0012
  = 1.2e-3
even
  = even
  = Even
  = \text{even}
  = The answer is even.
  = **even**
  ! odd
  ! veen
  ! not even
\text{even}
  = even
no solution
  = No solution
  = no solutions
\text{(A)}
  = A
A
  = (A)
  = A.
  = a
  ! B
(B)
  = B
Monday
  = monday
  ! Tuesday
True
  = true
x^2-1
  = (x-1)(x+1)
  = x**2 - 1
  ! x^2+1
2x+1
  = y = 2x+1
y=2x+1
  = 2x+1
  = y = 1 + 2x
  ! y = 2x
xy
  = yx
2+3i
  = 3i+2
\begin{pmatrix}1&2\\3&4\end{pmatrix}
  = \begin{bmatrix}1&2\\3&4\end{bmatrix}
  ! \begin{pmatrix}1&2\\4&3\end{pmatrix}
90^\circ
  = 90°
  = 90
  = 90 degrees
90
  = 90^\circ
3:4
  = 3/4
2^{10}
  = 1024
10!
  = 3628800
\log_2 8
  = 3
3
  = \log_2 8
0.333
  ! 1/3
\frac{1}{3}
  = 0.333333
  ! 0.33
5 \text{ cm}
  = 5 cm
  = 5
  = 5 centimeters
  ! 5 m
5
  = 5 cm^2
  = 5 cm²
  = 5 square feet
5 \text{ cm}^2
  = 5 cm^2
18 \text{ km/h}
  = 18 km/h
  ! 18 m/s
$18
  = $18
  ! €18
\infty
  = infinity
  = ∞
\emptyset
  = ∅
x \in [1,2]
  = [1,2]
[1,2]
  = x \in [1, 2]
3 \pm \sqrt{2}
  = 3 ± √2
-1,1
  = ±1
  = 1, -1
070
  = 70
025
  = 25
25
  = 025
204
  = 204.
42
  = The answer is $42$.
  = So we get $6 \cdot 7 = 42$. The answer is $\boxed{42}$.
  = \fbox{42}
  = $$42$$
  = \[42\]
  = 6*7
  = 6 × 7
  = 42.0000
  = ≈ 42
  = approximately 42
  = 42 (approximately)
  = "42"
  = '42'
  = '42'.
  = (42)
  = {42}
  = [42]
  = 42^{1}
  = 4.2e1
  = 42 = 42
  = x=42
  = n = 42
  = \boxed{42
  = \boxed{\text{42}}
  = \text{42}
  = \mathbf{42}
  = \textbf{42}
  = 42 \text{ apples}
  = 42\ \text{apples}
  = 42~\text{cm}
  = 42\%
  = 42\,\mathrm{m/s}
  = I have 42 apples.
  = Total: 42
  = total = 42
  = The total cost is $42.
  = The total cost is \$42.00.
  = about 42
  = -(-42)
  = --42
  ! 42 ± 1
  ! 42!
  ! 42^2
  ! 42/2
  ! 41.9999
  ! 4 2
  ! 0x2A
  ! 42.5
  ! x = 41
  ! x > 42
  ! x \ge 42
  ! > 42
  ! <42
  ! \infty
  ! NaN
  ! None
  ! any number
  ! x
  ! \boxed{}
  ! 42 apples and 3 pears
  ! There are 42 apples in 3 boxes.
  = There are 42 of them
  ! It costs 42 dollars and 0 cents
  ! 42 or maybe 43
  ! either 42 or 43
  ! 42, I think
  ! maybe 42
  ! 42?
  ! 42-43
  ! 41 to 43
  ! 41-43
  ! less than 42
  ! one of 42 and 43
  ! 42;43
  ! 42\text{ or }43
  ! 42 \vee 43
  ! \{42, 43\}
  ! [41, 43]
  ! (41, 43)
  ! x \in [41,43]
  ! the negative of 42
  ! 42 hundred
  ! 42 percent of 100
  ! the square root of 42
  ! a third of 42
  ! 42 divided by 2
  ! 42 more
  ! over 42
  ! 42+
  = forty-two
-5
  = -5
  = - 5
  = (-5)
  = negative 5 degrees
  = −5°C
  = minus five
  ! 5
0
  = 0
  = 0.0
  = -0
  = zero
  ! \emptyset
1
  = 1.0
  = \frac{2}{2}
  = 100%
  ! 0.99
  ! 0
1000000
  = 1,000,000
  = 1{,}000{,}000
  = 1 000 000
  = $1,000,000
  = 1 million
  = 1 million dollars
  = 10^6
  = 10⁶
  = 1e6
  ! 1,000,00
2500
  = 2.5 thousand
  = 2.5k
24
  = 2 dozen
  = 2 dozen eggs
3.5
  = 3.50
  = $3.50
  = 3 1/2
  = 3½
  = 7/2
  ! 3,5
3,5
  = 3,5
  = 5,3
  = x = 3, x = 5
  = x=3 or x=5
  = 3 or 5
  = 3 and 5
  = \{3,5\}
  = 3, 5.
  ! 3.5
  ! 3
  ! 35
  ! 3,5,7
(3,5)
  = (3,5)
  = (3, 5)
  = 3, 5
  = \left(3,5\right)
  = \left( 3, 5 \right)
  ! (5, 3)
\left(3,\frac{\pi}{2}\right)
  = (3, \pi/2)
  = (3, pi/2)
  ! (3, \pi)
(0,\infty)
  = (0, ∞)
  = (0, infinity)
  ! [0, \infty)
[-2,7]
  = [-2, 7]
  = [ -2 , 7 ]
  = x \in [-2,7]
  ! [-2, 7)
  ! -2, 7
(-\infty,0)\cup(0,\infty)
  = (-\infty, 0) \cup (0, \infty)
\{-1,0,1\}
  = {-1, 0, 1}
  = -1, 0, 1
  = {0, 1, -1}
  ! {0, 1}
\frac{11}{36}
  = 11/36
  = \tfrac{11}{36}
  = \frac{22}{72}
  = 0.305555555
  ! 0.31
  ! 36/11
\frac{9}{7}
  = 1 2/7
  = 1\frac{2}{7}
  = \frac{9}{7} \text{ cm}
11\sqrt2
  = 11\sqrt{2}
  = 11√2
  = 11*sqrt(2)
  = 15.556349
  ! 15.56
\frac{3\sqrt{3}}{4}
  = 3√3/4
  = \frac{3}{4}\sqrt{3}
  = (3\sqrt{3})/4
6-5i
  = 6 - 5i
  = -5i + 6
  ! 6+5i
\frac{270}7\text{ degrees}
  = \frac{270}{7}
  = 270/7 degrees
  = 270/7
5.4 \text{ cents}
  = 5.4
  = 5.4 cents
  ! 5.4 dollars
\$18.90
  = 18.90
  = $18.90
  = 18.9
10\%
  = 10%
  = 10 percent
  = 0.1
  ! 0.01
x^3+3x-6
  = x^3 + 3x - 6
  = 3x - 6 + x^3
  = x**3+3*x-6
  ! x^3+3x+6
4x^2+4x+1
  = (2x+1)^2
\text{Evelyn}
  = Evelyn
  = evelyn
  ! Carla
  ! Evelyn or Carla
\text{(C)}
  = C
  = (C)
  = \text{C}
  = \textbf{(C)}
  ! D
  ! C or D
\text{Yes}
  = yes
  ! no
Yes
  = Yes.
  ! yes and no
odd
  = Odd.
  = The answer is odd
  ! even
p - q
  = p-q
  = -(q-p)
  ! p + q
  ! q-p
y = \frac{1}{2}x + 3
  = y = x/2 + 3
  = x/2 + 3
2k
  = 2k
  ! 2000
52_8
  = 52_8
  = 42
  ! 52
2016_{9}
  = 2016_9
  ! 2016
13535
  = 13535
033
  = 33
080
  = 80
540
  = 540^\circ
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}
  = \begin{pmatrix} -\frac{1}{3} \\ \frac{2}{3} \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix}
  ! \begin{pmatrix} 2 \\ 1 \end{pmatrix}
3.14 \times 10^{-5}
  = 3.14e-5
  = 0.0000314
  = 3.14*10^-5
6.02e23
  = 6.02 \times 10^{23}
\tan x
  = \frac{\sin x}{\cos x}
e^2
  = e^{2}
\ln 2
  = ln(2)
"""


def rows():
    gold = ""
    for line in TABLE.strip().splitlines():
        if line.startswith("  "):
            yield gold, line[4:].replace("\\n", "\n"), line[2] == "="
        else:
            gold = line


ROWS = list(rows())


def test_the_table_is_large_and_has_both_kinds():
    assert len(ROWS) == len({(gold, answer) for gold, answer, _ in ROWS}) > 450
    assert min(sum(equal for *_, equal in ROWS), sum(not equal for *_, equal in ROWS)) > 150


@pytest.mark.parametrize(("gold", "answer", "equal"), ROWS)
def test_an_answer_is_the_gold_one_or_not(gold, answer, equal):
    assert score({"gold": gold, "answer": answer})["equal"] is equal


@pytest.mark.parametrize("gold", list(dict.fromkeys(gold for gold, *_ in ROWS)))
def test_each_gold_answer_is_equal_to_itself_in_a_box_too(gold):
    assert score({"gold": gold, "answer": gold})["equal"] is True
    assert score({"gold": gold, "answer": rf"So it is $\boxed{{{gold}}}$."})["equal"] is True


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{1}. Then \boxed{2} it is.", "2"),
        ("6 * 3 = 18\n#### 18", "18"),
        ("The answer is 17. No: the answer is 18 dollars. That is all.", "18 dollars"),
        ("Final answer: 3.5", "3.5"),
        ("the answer is not 18", "not 18"),
        ("  18 ", "18"),
    ],
)
def test_the_final_answer_is_told_apart_from_prose(text, answer):
    assert find_final_answer(text) == answer
