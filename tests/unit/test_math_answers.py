"""Golds of mathematics with answers that are right and wrong, by what graders get wrong; and hostile ones.

The table has a gold, then what equals it (`=`) and what does not (`!`). Near numbers, lists with an ellipsis,
congruences, bases, conditions, and formulas of which a part could be dropped come first; then forms in which models
write right answers.
"""

# ruff: noqa: RUF001 - signs that look alike are what this is about
from __future__ import annotations

import importlib

import pytest

from prorl_trio.handlers.final_answer import MAX_TAIL_CHARS, extract_boxed, find_final_answer, last_number
from prorl_trio.handlers.math import MathHandler
from prorl_trio.handlers.math_scorer import check_gold, score

TABLE = r"""
1.6 \times 10^{-19}
  = 1.6e-19
  = 1.60 \times 10^{-19}
  = 1.6*10^-19
  = 1.6 × 10⁻¹⁹
  = 0.00000000000000000016
  ! 1.61e-19
  ! 1.6e-20
  ! 1.6
  ! 10^{-19}
  ! 0
6.02214076e23
  = 6.02214076 \times 10^{23}
  = 602214076000000000000000
  ! 6.02214077e23
\frac{1}{2^{99}}
  = 2^{-99}
  ! 2^{-98}
  ! 0
\frac{1}{1000000007}
  ! \frac{1}{1000000009}
  ! 0
0.1
  = 1/10
  = 0.10
  = 0.1000000000000000055
  ! 0.1000001
2.50
  = 5/2
  = 2.5
  ! 2.49999
  ! 2.500001
0.123456789
  = 0.1234567890
  ! 0.12345679
  ! 0.123457
\sqrt{2}
  = 1.41421356
  = 1.4142135623730951
  = 2**0.5
  = 2^{1/2}
  = sqrt(2)
  = sqrt 2
  = √2
  = math.sqrt(2)
  ! 1.41
  ! 1.5
  ! -\sqrt2
1, 3, 5, \ldots, 99
  = 1,3,5,...,99
  = 1, 3, 5, \dots, 99
  = 1, 3, 5, …, 99
  ! 99
  ! 1, 3, 5, 99
  ! 1,3,7,...,99
  ! 1, 3, 5, \ldots, 97
\{2, 4, 6, \ldots\}
  = \{2,4,6,\dots\}
  ! \{2,4,8,\dots\}
  ! \{2,4,6\}
1 + 2 + \cdots + n
  ! 1 + 3 + \cdots + n
  ! n
  = 1+2+\dots+n
x \equiv 2 \pmod{5}
  = x \equiv 2 \pmod 5
  = x ≡ 2 (mod 5)
  = x \equiv 7 \pmod 5
  = x \equiv -3 \mod 5
  = 2 \pmod{5}
  = x \equiv 2 \bmod 5
  ! x \equiv 2 \pmod{7}
  ! x \equiv 3 \pmod{5}
  ! 2
  ! 5
n \equiv 0, 2 \pmod{3}
  = n \equiv 2, 0 \pmod 3
  = n \equiv 0 \text{ or } 2 \pmod 3
  ! n \equiv 0 \pmod 3
2
  ! x \equiv 2 \pmod 5
  ! 2 \pmod 5
  ! 2 (mod 5)
101_2
  = 101_{2}
  = (101)_2
  = 5
  ! 101
  ! 101_3
  ! 101_{10}
  ! 10_2
2B_{16}
  = 2B_{16}
  = 2b_{16}
  = 43
  ! 2B
  ! 2A_{16}
\frac{\mathrm{d}y}{\mathrm{d}x}
  ! \frac{\mathrm{d}z}{\mathrm{d}x}
3\mathbf{i} - 2\mathbf{j}
  = 3\mathbf{i}-2\mathbf{j}
  = -2\mathbf{j}+3\mathbf{i}
  = 3i - 2j
  = 3\hat{i}-2\hat{j}
  ! 3\mathbf{i} + 2\mathbf{j}
\operatorname{arctan} 2
  = \arctan 2
  = atan(2)
  = \tan^{-1} 2
  = \tan^{-1}(2)
  = arctg 2
  ! \arctan 3
\operatorname{lcm}(4,6)
  = 12
  = lcm(4,6)
  ! 24
n! \text{ for even } n
  = n! for even n
  ! n! \text{ for odd } n
  ! n!
2^n \text{ if } n > 3
  ! 2^n
  ! 2^n \text{ if } n > 4
7!!
  = 105
  ! 7!
  ! 5040
8:15
  = 8:15
  = 08:15
  ! \frac{8}{15}
  ! 8/15
  ! 16:30
12:05
  ! 12:50
\pm 5
  = 5, -5
  = -5, 5
  = ±5
  = 5 or -5
  = x = \pm 5
  = +5, -5
  = \{-5, 5\}
  ! 5
  ! -5
2 \pm \sqrt{3}
  = 2+\sqrt3, 2-\sqrt3
  = 2-\sqrt{3} \text{ and } 2+\sqrt{3}
  = x = 2 \pm \sqrt 3
  ! 2+\sqrt3
x = 2 \text{ or } x = 3
  = 2, 3
  = x=3, x=2
  = x = 2, 3
  = x \in \{2,3\}
  = \{2,3\}
  ! 2
  ! x = 2
x > 3
  = (3, \infty)
  = x>3
  = 3 < x
  = (3,+\infty)
  = x \in (3, \infty)
  = \{x : x > 3\}
  = \{x \mid x > 3\}
  = ]3, \infty[
  ! x \ge 3
  ! [3, \infty)
  ! x < 3
  ! 3
x \le -1 \text{ or } x \ge 1
  = (-\infty, -1] \cup [1, \infty)
  = |x| \ge 1
  = x \in (-\infty,-1] \cup [1,\infty)
  ! (-\infty, -1) \cup (1, \infty)
  ! [-1,1]
  ! |x|>1
(1, 4]
  = 1 < x \le 4
  = ]1,4]
  = (1;4]
  = 4 \ge x > 1
  ! [1,4)
  ! 1 \le x \le 4
  ! (1,4)
\mathbb{R} \setminus \{2\}
  = (-\infty,2)\cup(2,\infty)
  = x \ne 2
  = x \neq 2
  = \mathbb{R} - \{2\}
  ! \mathbb{R}
\mathbb{R}
  = (-\infty,\infty)
  = all real numbers
  = \text{all real numbers}
  ! \mathbb{Z}
exp(2)
  = e^2
  = e**2
  = E**2
  ! e
e^{-1}
  = exp(-1)
  = 1/e
  = \frac{1}{e}
  = math.exp(-1)
\log_2 5
  = log2(5)
  = log(5, 2)
  = \frac{\ln 5}{\ln 2}
  = log(5)/log(2)
  = \log 5 / \log 2
  = math.log2(5)
  ! \log_5 2
\ln 2
  = log(2)
  = \log 2
  = 0.693147
  ! \log_2 10
|x-1|
  = abs(x-1)
  = Abs(x - 1)
  = |1-x|
  = \left|x-1\right|
  = \lvert x-1\rvert
  ! x-1
\lceil x \rceil
  = ceil(x)
  = ceiling(x)
  ! \lfloor x \rfloor
\binom{5}{2}
  = 10
  = C(5,2)
  = comb(5,2)
  = binomial(5, 2)
  = C_5^2
  = {5 \choose 2}
  ! \binom{5}{1}
\frac{1+i\sqrt{3}}{2}
  = 0.5 + \frac{\sqrt3}{2}i
  = e^{i\pi/3}
  = 1/2 + sqrt(3)/2*I
  = (1+sqrt(3)*I)/2
  ! \frac{1-i\sqrt{3}}{2}
2i
  = 2I
  = \sqrt{-4}
  = 0+2i
  = 2j
  ! -2i
  ! 2
3+4i
  = (2+i)^2
  = 3 + 4 i
  = 4i+3
  ! 5
  ! 3-4i
\frac{1}{6}
  = 0.1\overline{6}
  = 0.1\bar{6}
  = 0.1(6)
  = 0.1666\ldots
  = 0.1666...
  = 0.166667
  = 0.166666
  ! 0.17
  ! 0.166
  ! 0.1\overline{7}
0.\overline{27}
  = 3/11
  = \frac{3}{11}
  = 0.272727...
  ! 0.27
12.5\%
  = 12.5%
  = 0.125
  = 1/8
  = 12.5
  = 12.5 percent
  = 12\frac12\%
  ! 1.25
  ! 0.0125
2:3
  = 4:6
  = 2/3
  = 2 : 3
  ! 3:2
1:2:3
  = 2:4:6
  ! 1:3:2
  ! 1:2
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
  = \left[\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right]
  = \begin{bmatrix}1&2\\3&4\end{bmatrix}
  = [[1,2],[3,4]]
  = [[1, 2], [3, 4]]
  = Matrix([[1, 2], [3, 4]])
  = \left(\begin{matrix}1&2\\3&4\end{matrix}\right)
  = \begin{pmatrix} 1 & 2 \\[2pt] 3 & 4 \end{pmatrix}
  = A = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
  ! \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
  ! \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}
  ! -2
  ! 2\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix} 3 \\ -7 \end{pmatrix}
  = (3, -7)
  = \begin{bmatrix}3\\-7\end{bmatrix}
  ! (−7, 3)
  ! \begin{pmatrix} 3 & -7 \end{pmatrix}
(3,4)
  = the point (3,4)
  = The point $(3,4)$
  = (3, 4)
  = x=3, y=4
  = (x,y)=(3,4)
  = \langle 3, 4\rangle
  = P(3,4)
  ! \{3,4\}
  ! (4,3)
  ! -(3,4)
  ! 2(3,4)
  ! (3,4)+1
  ! (3,4,5)
\{1,2\}
  = \{2,1\}
  = {1,2}
  = 1, 2
  ! (1,2)
  ! [1,2]
42
  = AB = 42
  = \angle ABC = 42^\circ
  = |AB| = 42
  = f(3) = 42
  = The value is $42$.
  = 42 \text{ square units}
  = 42 square units
  = 42 units
  = 42\text{ units}^2
  = 42 cm
  = 42 cubic feet
  = 42\,\text{cm}^2
  = \textcolor{red}{42}
  = {\color{red}42}
  = \boldsymbol{42}
  = \bm{42}
  = \,42
  = No. 42
  = \displaystyle 42
  = $42
  = 42 people
  = 42 different ways
  = There are 42 different ways.
  = 42\text{ ways}
  = Therefore, the answer is 42.
  = **42**
  = n=42
  = 84/2 = 42
  = \frac{84}{2} = 42
  = x = 84/2 = 42
  = 42 \approx 42.0
  = 42 \checkmark
  ! 41 = 42
  ! 42 = 41
  ! x=41=42
  ! 42 \text{ or } 43
  ! 42x
  ! 42_{10}1
  ! 42\%5
  ! 42!
  ! 42'
  ! \overline{42}
  ! \sqrt{42}
  ! 42^{\circ 2}
  ! 42 \mod 5
  ! 42i
  ! 42 + \epsilon
  ! \approx 41
  ! 42 \text{ if } x>0
  ! \{42, 42.5\}
  ! 42 unless n is odd
  ! \underbrace{42}_{7}
  ! 42 \neq 43
  ! 42 < 43
  ! \sum 42
  ! \int 42
p - q
  = -(q-p)
  = -q + p
  ! p+q
  ! p*q
  ! p/q
  ! -p-q
  ! q-p
n \log n
  = n log n
  = n*log(n)
  ! n + \log n
  ! \log n
abc
  = cba
  = a*b*c
  = a b c
  ! ab
  ! a+b+c
\frac{x^2}{2} + C
  = x^2/2 + C
  = 0.5x^2 + c
  = \frac{1}{2}x^2+C
  ! \frac{x^2}{2}
\sqrt{x^2}
  = |x|
  ! x
\sqrt{ab}
  = \sqrt{a}\sqrt{b}
  = (ab)^{1/2}
  ! \sqrt{a+b}
x^2+y^2=1
  = x^2 + y^2 = 1
  = 1 = x^2+y^2
  = 2x^2+2y^2=2
  = x^2+y^2-1=0
  ! x^2+y^2=2
  ! x^2+y^2
  ! 1
y = 2x + 1
  = 2x - y + 1 = 0
  = y - 2x = 1
  = y=2x+1
  = f(x) = 2x+1
  = 2x+1
  ! y = 2x
  ! x = 2y+1
1\frac{3}{4}
  = 7/4
  = 1.75
  = 1 3/4
  = 1 \frac{3}{4}
  ! 3/4
  ! 13/4
2\frac{x}{3}
  = \frac{2x}{3}
\text{Tuesday}
  = Tuesday
  = tuesday
  ! Monday
\text{A, C, D}
  = A, C, D
  = A,C,D
  = D, C, A
  = \text{A, C and D}
  ! A, C
  ! A, C, E
even
  ! veen
  ! odd
  = It is even
\text{No solution}
  = no solution
  ! solution
18
  = The answer is 18, which is 9*2.
  = So 2*9 = 18.
  = 2 \times 9 = 18
  = <answer>18</answer>
  = **Answer**: 18
  = The final answer is: $\boxed{18}$. I hope it is correct.
  = \boxed {18}
  = \boxed 18
  = \fbox{18}
  = \boxed{18}\boxed{}
  = \boxed{\boxed{18}}
  ! The answer is 17, not 18.
  ! Answer: 17 (18 is wrong)
  ! The answer is 18 or 19
  ! \boxed{17}, \boxed{18}
  ! \boxed{17} and \boxed{18}
  ! \boxed{2\boxed{18}}
(2,2), (6,2)
  = \boxed{(2,2)} and \boxed{(6,2)}
  = (2,2) and (6,2)
  = \{(2,2),(6,2)\}
  = (6,2),(2,2)
  = (2,2);(6,2)
  = (2, 2) \text{ or } (6, 2)
  ! (2,2)
  ! (6,2)
  ! (2,6),(2,2)
\frac{\pi}{4} + k\pi, k \in \mathbb{Z}
  = \frac{\pi}{4}+k\pi, k\in\mathbb{Z}
  = \pi/4 + \pi k, k \in \mathbb{Z}
  ! \frac{\pi}{4}
60^\circ
  = 60
  = 60 degrees
  = 60°
  ! 30^\circ
\sin 30^\circ
  = 1/2
  = 0.5
12 \text{ hours and } 30 \text{ minutes}
  = 12 hours and 30 minutes
  ! 12 hours and 40 minutes
  ! 12
\triangle ABC
  = \triangle ABC
  ! \triangle ABD
\overline{AB}
  ! \overline{AC}
  ! AB
A
  = A
  = (A)
  = a
  ! -A
  ! B
  ! A or B
2^{25} 26!
  = 2^{25} \cdot 26!
  = 26! * 2^25
\tan x
  = \sin x/\cos x
  ! \tan y
\frac{a+b}{c}
  = (a+b)/c
  ! a+b/c
x_1 + x_2
  = x_2+x_1
  = x_{1}+x_{2}
  ! x_1+x_3
\emptyset
  = \varnothing
  = \{\}
  = empty set
$0,3,6,9, \ldots, 6048$
  = 0,3,6,9,\ldots,6048
  ! 6048
-\frac{1}{2}
  = -0.5
  = \frac{-1}{2}
  = \frac{1}{-2}
  = - 1/2
  ! 0.5
\left(-\frac{13}{96},\frac{13}{40}\right)
  = (-13/96, 13/40)
  ! -\left(-\frac{13}{96},\frac{13}{40}\right)
  ! 2\left(-\frac{13}{96},\frac{13}{40}\right)
  ! \left(-\frac{13}{96},\frac{13}{40}\right)+1
7
  = $\boxed{7}$
  = 7.0
  = +7
  = seven: 7
  = x \approx 7
  = 7\text{.}
  = 7\ \text{cm}
  = 7\;\text{cm}
  = \text{7}
  = \mathbf{7}
  = {7}
  = 7 km/hr
  = 7 \frac{\text{km}}{\text{h}}
  = 7\text{ m/s}
  = 7 hours
  = 7\text{ cm}^{3}
  = 7 apples each
  = exactly 7
  = Answer = 7
  = answer: **7**
  = The final answer is 7
  = f(2)=7
  = f(2) = 3+4 = 7
  = a+b = 7
  = m+n=7
  = P = 7
  = \boxed{x=7}
  = x=7.
  = 7;
  = $7$.
  = \(7\).
  = \[ 7 \]
  = 7\%
  = 14/2
  = 7 \cdot 1
  = \frac{14}{2}
  = 2+5
  = \sqrt{49}
  = 49^{1/2}
  = 7^1
  = \left(7\right)
  = \lfloor 7.5 \rfloor
  = 07
  = 7.
  = N = 7 \text{ ways}
  = There are \boxed{7} ways.
  = \boxed{7} and that is it
  = 7\text{ distinct values}
  = \$7
  = 7\$
  = 7 USD
  = 7 €
  = \text{The answer is } 7
  = \text{Answer: } 7
  ! 7 \text{ or } 8
  ! 7 \text{ and } 8
  ! 7, 8
  ! (7, 8)
  ! 7..8
  ! 7-8
  ! 7 to 8
  ! 7/8
  ! 7:8
  ! 7 < 8
  ! \ge 7
  ! \geq 7
  ! >=7
  ! at least 7
  ! 7+
  ! 7^2
  ! 7!
  ! 7!!
  ! 7'
  ! 7x
  ! 7\pi
  ! 7i
  ! 7e
  ! 7\sqrt{2}
  ! -7
  ! \pm 7
  ! |−7|+1
  ! 7_8x
  ! 70
  ! 77
  ! 0.7
  ! 7.1
  ! 7 \text{ million}
  ! 7 dozen
  ! 7^\circ 30'
  ! \log 7
  ! 7 \pmod{9}
  ! 7 mod 9
  ! \{7, 8\}
  ! [7, 8]
  ! \frac{7}{1/0}
  ! 7 \cdot 0
  ! 7\ldots
  ! 7, \ldots
  ! \ldots, 7
  ! 7...
  ! \overline{7}
  ! \dot{7}
  ! \vec{7}
  ! 7^{\text{th}}
  ! \sum_{i=1}^{7} i
  ! \int_0^7 dx x
  ! \lim_{x\to 7} 2x
  ! \text{not } 7
  ! \neg 7
  ! 7 \text{ is wrong}
  ! 7 \text{ if } n \text{ is even}
  ! 7 for n even
  ! 7 when x > 0
  ! 7 assuming x > 0
  ! 7 provided that
  ! 7 unless x=0
  ! 7 \quad (n \text{ odd})
  ! 7 \mid 14
  ! 7 \% 5
  ! 7 // 2
  ! 7 \oplus 2
  ! 7 \star 2
  ! 7 \circ 2
  ! 7 \choose 2
  ! 7 \over 2
  ! 7 & 8
  ! 7 \\ 8
  ! 7 \to 8
  ! 7 \Rightarrow 8
  ! 7 \implies 8
  ! 7 \sim 8
  ! 7 \propto 8
  ! 7^{7
  ! 7)
  ! (7
  ! 7]
  ! [7
  ! f(7)
  ! g(x) = 7x
  ! x^7
  ! x_7
  ! 7_{10}0
  ! 7 = 8
  ! 8 = 7
  ! 7 \ne 7
  ! 7 < x
  ! x < 7
  ! 7 = x = 8
  ! either 7 or 8
  ! 7 hundred
  ! 7 squared
  ! 7 cubed
  ! 7 percent of 10
  ! 7% of 10
  ! the square of 7
  ! twice 7
  ! a third of 7
  ! negative 7
  ! minus 7
  ! opposite of 7
  ! \boxed{6} \boxed{7} \boxed{8}
  ! \boxed{7}, \boxed{8}
  ! \boxed{7} or \boxed{8}
  ! 7 or 8 or 9
  ! 1,2,3,4,5,6,7,8,9
  ! 7\text{, }8
  ! 7\text{ to }8
  ! \text{between }6\text{ and }7
  ! x = 7, y = 8
  ! x \in \{7, 8\}
  ! 7 \cup 8
  ! 7 \times 10^3
  ! 7e3
  ! 7E-2
  ! 7k
  ! \binom{7}{2}
  ! C_7^2
  ! \begin{pmatrix} 7 \\ 8 \end{pmatrix}
  ! 7^{-1}
  ! 1/7
  ! \frac17
  ! 7 fifths
  ! 7 alpha
  ! 7 log n
  ! 7 abc
  ! 7 apples x
  ! 7 exp
  ! 7 pi
-\frac{3}{4}
  = -3/4
  = \frac{-3}{4}
  = -\tfrac34
  = -0.75
  = -75\%
  = −¾
  = x = -3/4
  ! 3/4
  ! -4/3
  ! 0.75
\frac{5}{8}
  = 5/8
  = .625
  = 0.625
  = \frac58
  = \frac 58
  = \frac 5 8
  = \frac{5}8
  = \frac5{8}
  = 5 / 8
  = {5 \over 8}
  = 10/16
  = 62.5%
  = \dfrac{5}{8} \text{ miles}
  = five eighths: 5/8
  ! 8/5
  ! 5 8
  ! 0.63
\frac{2}{3}
  = 0.666667
  = 0.6666666
  = 0.66666666666667
  = 0.6666666666666666
  = 0.\overline{6}
  = 0.\bar 6
  = 0.666...
  = 66\frac{2}{3}\%
  = 66.\overline{6}\%
  ! 0.66
  ! 0.67
  ! 0.6667
  ! 0.666668
  ! 2/30
4\sqrt{13}
  = 4 \sqrt{13}
  = 4*sqrt(13)
  = sqrt(208)
  = \sqrt{208}
  = 4\sqrt{13}\text{ units}
  = 4√13
  = 14.422205101855956
  = 4*13**0.5
  = 4*13**(1/2)
  = 2\sqrt{52}
  ! 14.42
  ! \sqrt{13}
\frac{-1+\sqrt{5}}{2}
  = (sqrt(5)-1)/2
  = (\sqrt5 - 1)/2
  = -1/2 + sqrt(5)/2
  = \frac{\sqrt{5}-1}{2}
  = \frac{2}{1+\sqrt5}
  = 0.6180339887
  ! \frac{1+\sqrt{5}}{2}
\sqrt[3]{4}
  = 4^{1/3}
  = 4**(1/3)
  = cbrt(4)
  = \sqrt[3]4
  = 2^{2/3}
  = ∛4
\sqrt[3]{-8}
  = -2
  ! 2
\frac{\pi}{6}
  = pi/6
  = π/6
  = \frac{1}{6}\pi
  = \pi/6 \text{ radians}
  = 0.5235987756
  ! 30^\circ
  ! 0.5236
16\pi
  = 16π
  = 16*pi
  = 16 \pi \text{ cm}^2
  = 16\pi square units
  = 16pi
  = 16 pi
  = \pi \cdot 16
  = 16\pi\text{ square inches}
  = A = 16\pi
  ! 16
  ! 50.27
2\sqrt{2}+3\sqrt{3}
  = 3\sqrt3+2\sqrt2
  ! 5\sqrt5
e^{i\pi/4}
  = \frac{\sqrt2}{2}(1+i)
  = \cos\frac{\pi}{4}+i\sin\frac{\pi}{4}
  = \frac{1+i}{\sqrt{2}}
  ! e^{-i\pi/4}
x^2 - 3x + 2
  = (x-1)(x-2)
  = x**2 - 3*x + 2
  = x^2-3x+2
  = 2-3x+x^2
  = f(x) = x^2-3x+2
  = y = x^2 - 3x + 2
  ! x^2 - 3x - 2
  ! x^2-3x+2=0
  ! 2
\frac{1}{x+1}
  = 1/(x+1)
  = (x+1)^{-1}
  = \frac{1}{1+x}
  ! 1/x+1
\sin^2 x
  = (\sin x)^2
  = sin(x)**2
  = 1-\cos^2 x
  = \frac{1-\cos 2x}{2}
  = \sin^2(x)
  ! \sin x^2
  ! \sin x
\ln(x^2+1)
  = ln(1+x^2)
  = log(x^2+1)
  ! \ln(x^2)+1
\ln 6
  = \ln 2+\ln 3
  = ln(6)
  = log(6)
  = \log_e 6
  ! \log_{10} 6
\log_{10} 2
  = \log 2
  = lg 2
  = log10(2)
  ! \log_2 10
n(n+1)/2
  = \frac{n(n+1)}{2}
  = \binom{n+1}{2}
  = \frac{n^2+n}{2}
  ! n(n-1)/2
2^{n}-1
  = 2^n - 1
  = 2**n-1
  ! 2^{n-1}
\frac{n!}{(n-2)!}
  = n(n-1)
  ! n^2
(-1)^n
  = (-1)^{n}
  = (-1)^{n+2}
  ! (-1)^{n+1}
  ! -1
2, 3, 5
  = 2,3,5
  = 5, 3, 2
  = 2, 3, and 5
  = 2, 3 and 5
  = {2,3,5}
  = \{2,3,5\}
  = [2, 3, 5]
  = x=2,3,5
  = x \in \{2,3,5\}
  = 2;3;5
  ! 2,3
  ! 2,3,5,7
  ! 235
(1, 2, 3)
  = 1, 2, 3
  = (1,2,3)
  = x=1, y=2, z=3
  = (x,y,z)=(1,2,3)
  = \left(1,2,3\right)
  ! (3,2,1)
  ! \{1,2,3\}
x=1,y=2
  = (1,2)
  = y=2, x=1
  = x=1 and y=2
  = x = 1, \quad y = 2
  = x=1 \text{ and } y=2
  = (x,y)=(1,2)
  ! x=2,y=1
  ! (2,1)
(a,b)
  = (a, b)
  ! (b,a)
[1, \infty)
  = [1, +\infty)
  = x \ge 1
  = 1 \le x
  = [1, oo)
  = [1,∞)
  = \{x \mid x \geq 1\}
  = \{x \in \mathbb{R} : x \ge 1\}
  ! (1,\infty)
  ! [1,\infty]
(-\infty, 2) \cup (3, \infty)
  = x<2 or x>3
  = x < 2 \text{ or } x > 3
  = (3,\infty) \cup (-\infty,2)
  = (-∞, 2) U (3, ∞)
  = x \in (-\infty,2)\cup(3,\infty)
  = \mathbb{R} \setminus [2,3]
  ! (-\infty, 2] \cup [3, \infty)
  ! (2,3)
-3 \le x < 5
  = [-3,5)
  = x \in [-3, 5)
  = -3 <= x < 5
  = -3≤x<5
  = 5 > x \ge -3
  ! [-3,5]
  ! (-3,5)
0 < x < 1
  = (0,1)
  = 0<x<1
  = x>0 and x<1
  ! 0<y<1
  ! [0,1]
\frac{1}{2} < k < 1
  = (1/2, 1)
  = (0.5, 1)
  = 0.5<k<1
  ! (1/2,1]
a > b
  = b < a
  ! a < b
x^2 > 4
  = x^2 > 4
  ! x^2 < 4
12:30 \text{ p.m.}
  = 12:30 p.m.
  = 12:30 PM
  = 12:30 \text{ PM}
  ! 12:30 a.m.
  ! 12/30
3:1
  = 3 : 1
  = 3
  = 3/1
  = 6:2
  ! 1:3
1{,}000{,}000
  = 1000000
  = 10^6
  = 1,000,000
  = 1e6
  = one million: 1000000
  ! 1,000
1,2,3
  = 1, 2, 3
  ! 123
100,200
  = 100, 200
  = 100200
45\%
  = 0.45
  = 45
  = \frac{9}{20}
  = 45 percent
  = 45.0%
  ! 4.5
  ! 0.045
\$1{,}234.50
  = 1234.5
  = $1,234.50
  = 1234.50 dollars
  ! €1234.50
25^\circ \text{C}
  = 25°C
  = 25
  = 25 degrees
  = 25 degrees Celsius
5\text{ cm}
  = 5 cm
  = 5cm
  = 5\,\mathrm{cm}
  = 5 \mathrm{~cm}
  = 5
  ! 5 mm
  ! 5 cm^2
  ! 50
10\text{ m/s}
  = 10 m/s
  = 10 \frac{\text{m}}{\text{s}}
  = 10 meters per second
  ! 10 km/h
\text{(A) and (C)}
  = (A) and (C)
  = A, C
  = A and C
  ! A
\text{B}
  = B
  = (B)
  = \textbf{(B)}
  = Option B
  ! A
\text{False}
  = False
  = false
  ! True
  ! not False
\text{Monday, Wednesday}
  = Monday, Wednesday
  = Wednesday and Monday
  ! Monday
\text{infinitely many}
  = infinitely many
  = Infinitely many
  ! \infty
\text{isosceles triangle}
  = isosceles triangle
  = an isosceles triangle
  ! triangle
\text{No}
  = No
  = no
  = no.
  ! yes
  ! on
\text{odd}
  = odd
  ! ddo
  ! even
C
  = (C)
  = c
  ! D
-x
  = -x
  ! x
x
  ! -x
  ! y
  ! X + 1
k
  = k
  ! 1000
f(x) = x + c
  = x+c
  ! x
f(x)=2x, f(x)=-2x
  = f(x) = \pm 2x
  = 2x, -2x
  ! 2x
a_n = 2n - 1
  = 2n-1
  = a_n=2n-1
  ! 2n+1
\mathbf{v} = \begin{pmatrix} 1 \\ 2 \end{pmatrix}
  = \begin{pmatrix} 1 \\ 2 \end{pmatrix}
  = (1,2)
  ! \begin{pmatrix} 2 \\ 1 \end{pmatrix}
\begin{pmatrix} \frac{1}{2} & 0 \\ 0 & \frac{1}{2} \end{pmatrix}
  = \frac{1}{2}\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}
  = \begin{pmatrix} 0.5 & 0 \\ 0 & 0.5 \end{pmatrix}
  ! \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}
\{(1,2),(3,4)\}
  = (1,2),(3,4)
  = \{(3,4),(1,2)\}
  = (1,2) and (3,4)
  = [(1, 2), (3, 4)]
  ! (1,2)
  ! (2,1),(3,4)
2^{1000}
  = 2**1000
  ! 2^{1001}
  ! 2^{999}
\frac{10!}{3!}
  = 604800
  = factorial(10)/factorial(3)
  = 10!/6
2004!
  = 2004!
  ! 2005!
7^{7^7}
  = 7^{7^{7}}
  ! 7^{7^8}
  ! 7
x \equiv 1 \pmod{2}
  ! 1
  = x \equiv 3 \pmod 2
n \equiv 1 \pmod{m}
  = n \equiv 1 \pmod m
  ! n \equiv 2 \pmod{m}
3 \pmod 7
  = 3 \pmod{7}
  = 3 (mod 7)
  = 10 \pmod 7
  ! 3
\frac{a}{b} + \frac{c}{d}
  = \frac{ad+bc}{bd}
  ! \frac{a+c}{b+d}
\vec{a} + \vec{b}
  = \vec{b}+\vec{a}
  ! \vec{a}-\vec{b}
|x|
  = \sqrt{x^2}
  = abs(x)
  ! x
  ! -x
\frac{x+y}{|x+y|}
  ! 1
\max(a,b)
  = max(a,b)
  = \max(b,a)
  ! \min(a,b)
\gcd(12, 18)
  = 6
  = gcd(12,18)
\alpha^2
  = alpha^2
  = α^2
  ! \beta^2
\infty
  = oo
  = +\infty
  = infinity
  ! -\infty
-\infty
  ! \infty
\tan 75^\circ
  = 2+\sqrt3
  = 2 + \sqrt{3}
  = \tan(75^\circ)
\cos^{-1}\frac{1}{3}
  = \arccos(1/3)
  = acos(1/3)
  ! \cos\frac13
  ! 3
0
  = 0.0
  = -0
  = 0%
  = \sin \pi
  = 0 apples
  ! 0.000001
  ! 10^{-50}
  ! \emptyset
1
  ! 0.9999999
  ! 1.0000000001
  = 0.\overline{9}
  = 1.0000
\frac{1}{2}(x+1)^2
  = 0.5(x+1)^2
  = \frac{(x+1)^2}{2}
  = (x+1)**2/2
2\sin x\cos x
  = \sin 2x
  = sin(2x)
  = 2sin(x)cos(x)
  ! \sin x
\frac{\sqrt{6}-\sqrt{2}}{4}
  = sin(15°)
  = \sin 15^\circ
  = 0.2588190451
  = (sqrt(6)-sqrt(2))/4
\arctan\frac{1}{2}
  = \tan^{-1}\left(\frac{1}{2}\right)
  = arctan(0.5)
  = atan(1/2)
n^2+n
  = n(n+1)
  = n^2 + n.
  = $n^2+n$
a^2b^3
  = b^3a^2
  = a^2 b^3
  = a**2*b**3
  ! a^3b^2
\frac{3}{5}+\frac{4}{5}i
  = \frac{3+4i}{5}
  = 0.6+0.8i
  = 3/5 + 4i/5
  = 3/5 + 4*I/5
-\sqrt{3}
  = -1.7320508
  = -3^{1/2}
  = - \sqrt 3
8\text{ units}
  = 8 \text{ units}
  = 8 units
  = 8
  = 8 \mathrm{units}
  = 8\mbox{ units}
  = \text{8 units}
[3,7]
  = 3 \leq x \leq 7
  = [3, 7]
  = 3 \leqslant x \leqslant 7
  = \left[3,7\right]
  = {x | 3 ≤ x ≤ 7}
  = x\in[3,7]
  ! (3,7)
  ! [3,7)
(-\infty, -2) \cup (-2, 3) \cup (3, \infty)
  = \mathbb{R}\setminus\{-2,3\}
  = (-\infty,-2)\cup(-2,3)\cup(3,+\infty)
x \neq 3
  = x\ne3
  = (-\infty,3)\cup(3,\infty)
  = \mathbb{R} \setminus \{3\}
x=\frac{-b\pm\sqrt{b^2-4ac}}{2a}
  = \frac{-b\pm\sqrt{b^2-4ac}}{2a}
  = \frac{-b+\sqrt{b^2-4ac}}{2a}, \frac{-b-\sqrt{b^2-4ac}}{2a}
\frac{5\pi}{6}
  = 5π/6
  = 5*pi/6
  = \frac{5}{6}\pi
  = 2.6179938780
  = 5\pi/6 rad
3.2 \times 10^5
  = 320000
  = 3.2e5
  = 3.2*10**5
  = 320,000
  = 3.2\cdot 10^5
  ! 3.2 \times 10^6
  ! 3.2
9.8
  = 9.8 m/s^2
  = 9.80
  = 9.8 \text{ m/s}^2
  = 9.8\,\frac{\text{m}}{\text{s}^2}
  = 9.8 meters per second squared
  ! 9.81
25
  = 25 \text{ cents}
  = 25¢
  = 25 students
  = 25 \text{ miles per hour}
  = 25 mph
  = $25.00$
  = 25.00 dollars
  = \boxed{25\text{ hours}}
  = The total is 25.
  = Total distance: 25 miles
  = = 25
  = Thus, x = 25.
  = 5^2
  = 5²
  = 25 (in dollars)
  = **25 apples**
  = *25*
  = Answer: $\boxed{25}$
  = # 25
  = 25\\
  = ~25
  = 25 km.
  = 25-0
1/3
  = \frac{1}{3}
  = 33.\overline{3}\%
  = \frac{1}{3} \text{ of the total}
  = one third: 1/3
  = 1 / 3
  = 1 ÷ 3
  = 1:3
  = 0.3333333333
  = 2/6
  ! 0.33
  ! 3
10
  = 10 a.m.
  = 10\text{ a.m.}
  = 10 o'clock
4:30
  = 4:30 PM
  = 4:30 p.m.
  = 04:30
11:59
  = 11:59
  ! 11.59
December 25
  ! 25
  = December 25
  ! 25
  = december 25
  = December 25.
  ! December 24
Jan 1, 2000
  = Jan 1, 2000
2^3 \cdot 3^2
  = 72
  = 2^3 \times 3^2
  = 8 \cdot 9
m^2 n
  = nm^2
  = n m^2
4m
  = 4 m
  = 4*m
  = 4m
  = m \cdot 4
5s
  = 5 s
  = 5*s
2h + 3
  = 3+2h
  = 2 h + 3
x+3y=7
  = 3y+x=7
  = 3y + x - 7 = 0
  = y = \frac{7-x}{3}
  = 2x+6y=14
  ! x+3y=8
  ! 7
3x-2y
  = -2y+3x
  ! 3x+2y
x=3
  = 3
  = x = 3
  = 3 = x
  = x=3.0
  = \{3\}
  ! y = 3
  ! x=4
x=2, y=-1
  = (2,-1)
  = x = 2 \quad y = -1
  = x=2; y=-1
  = \begin{cases} x=2 \\ y=-1 \end{cases}
  ! (-1,2)
a=1,b=2,c=3
  = (1,2,3)
  = (a,b,c)=(1,2,3)
  = c=3,b=2,a=1
  = 1,2,3
\left\{-1,\frac{1}{2}\right\}
  = \{-1, 0.5\}
  = x=-1, x=1/2
  = x = -1 \text{ or } x = \frac12
  = -1, 1/2
  = {-1, 1/2}
f^{-1}(x)=\frac{x-1}{2}
  = \frac{x-1}{2}
  = f^{-1}(x)=(x-1)/2
  = (x-1)/2
  ! 2x+1
y^{2}=4x
  = y^2=4x
  = x = y^2/4
  = y^2 - 4x = 0
  ! y^2 = 8x
\frac{x^2}{4}+\frac{y^2}{9}=1
  = 9x^2+4y^2=36
  = x^2/4 + y^2/9 = 1
  ! \frac{x^2}{9}+\frac{y^2}{4}=1
(x-1)^2+(y-2)^2=9
  = x^2-2x+y^2-4y-4=0
  ! (x-1)^2+(y-2)^2=3
\sqrt{x}
  = x^{1/2}
  = x**0.5
  = sqrt(x)
  ! -\sqrt{x}
  ! x
\log_a b
  = \frac{\ln b}{\ln a}
  = log_a(b)
  ! \log_b a
\ln|x|+C
  = ln|x|+C
  = \ln |x| + c
  = log(abs(x)) + C
\frac{d}{dx}
  = \frac{d}{dx}
\sum_{k=1}^{n} k^2
  = \sum_{k=1}^n k^2
  = \sum\limits_{k=1}^{n} k^2
  ! \sum_{k=1}^{n} k
\int_0^1 x^2 dx
  = \int_0^1 x^2\,dx
  = \int_{0}^{1} x^{2} d x
  ! \int_0^1 x^3 dx
-1 < x < 1
  = |x| < 1
  = (-1,1)
  = \left|x\right|<1
x > 2 \text{ and } x < 5
  = (2,5)
  = 2<x<5
x \in \mathbb{R}
  = \mathbb{R}
  = all real numbers
  = (-\infty,\infty)
\text{None}
  = None
  = none
\text{undefined}
  = undefined
  = Undefined
  ! 0
\text{DNE}
  = DNE
  ! 0
\text{ellipse}
  = ellipse
  = an ellipse
  = Ellipse.
  = The answer is an ellipse.
  ! hyperbola
\text{Carla}
  = Carla
  = Carla.
  ! Evelyn
1 \text{ and } 2
  = 1, 2
  = 2 and 1
  = 1 \text{ or } 2
  = \{1,2\}
  ! 1
\frac{17}{4}
  = 4\frac{1}{4}
  = 4 1/4
  = 4.25
  = 17/4 \text{ cups}
  = 4¼
  ! 4
\frac{22}{7}
  ! \pi
  = 3.142857142857
  ! 3.14
100\pi
  = 314.159265
  ! 314
  ! 314.16
\sqrt{50}
  = 5\sqrt{2}
  = 7.0710678
  ! 7.07
1+\sqrt{2}
  = \sqrt{2}+1
  = 2.41421356
  = 1+√2
  ! 1-\sqrt{2}
  ! \sqrt{2}
0.05
  = 5\%
  = 1/20
  = 5e-2
  = .05
  ! 0.5
99.99
  = \$99.99
  = 99.990
  ! 100
  ! 99.9
-0.5
  = -1/2
  = -.5
10^{-3}
  = 0.001
  = 1e-3
  = 1/1000
  ! 0.0010001
2.0 \times 10^{-3}
  = 0.002
  = 2e-3
  ! 0.0021
1000
  = 1,000
  = 1 000
  = 10^3
  = 1000.00
  = one thousand: 1000
  = 1k
  = 1 thousand
  ! 1.000,5
314{,}159
  = 314159
  = 314,159
6\sqrt{3}-\pi
  = 6*sqrt(3) - pi
  = -\pi+6\sqrt3
  ! 6\sqrt3+\pi
e
  = E
  = exp(1)
  = 2.718281828459045
  = \mathrm{e}
\frac{e^x+e^{-x}}{2}
  = \cosh x
  = cosh(x)
  = (exp(x)+exp(-x))/2
  ! \sinh x
\lfloor \pi \rfloor
  = 3
  = floor(pi)
15!!
  = 2027025
  ! 15!
\det A
  ! A
A^{-1}
  = A^{-1}
  ! A
  ! A^T
A^T
  = A^T
  = A^{T}
  ! A
\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}
  = \begin{vmatrix}1&2\\3&4\end{vmatrix}
  ! \begin{vmatrix}1&2\\3&5\end{vmatrix}
\mathbf{a} \cdot \mathbf{b}
  = \mathbf{a}\cdot\mathbf{b}
  ! \mathbf{a}\times\mathbf{c}
\mathbf{a} \times \mathbf{b}
  ! \mathbf{b} \times \mathbf{a}
x \mapsto x+1
  = x \mapsto x + 1
  ! x+1
  ! x \mapsto x+2
p \implies q
  = p \implies q
  ! q \implies p
\neg p
  ! p
A \cap B
  = A \cap B
  ! A \cup B
A \subset B
  ! A
  ! B
2k+1, k \in \mathbb{Z}
  = 2k+1, k\in\mathbb{Z}
  = 1 + 2k, k \in \mathbb{Z}
  ! 2k
  ! 2k, k\in\mathbb{Z}
  ! 2k+1, k \in \mathbb{N}
\text{Yes, } 5
  = Yes, 5
  ! 5
  ! No, 5
5 \text{ or more}
  = 5 or more
  ! 5
\text{at least } 3
  = at least 3
  ! 3
  ! at most 3
\text{about } 50
  = 50
f(n) = \begin{cases} 1 & n \text{ odd} \\ 0 & n \text{ even}\end{cases}
  ! 1
  ! 0
  ! f(n) = \begin{cases} 0 & n \text{ odd} \\ 1 & n \text{ even}\end{cases}
2\frac{1}{2}
  = 5/2
  = 2.5
  ! 1
  = 2 \frac12
3\frac{1}{7}\text{ hours}
  = 22/7
  = 22/7 hours
34
  ! 34 !
127
  ! (odd n) 127
  ! i 127
There are 127 ways
  = There are 127 ways.
  ! 127
75+24\sqrt{2}
  ! 75+24\sqrt{2} (odd n)
1234.50
  ! 1234.51
  ! 1234.509
1234567
  ! 1234567 \ldots
"""


def golds():
    answers: list[tuple[str, bool]] = []
    for line in TABLE.strip().splitlines():
        if line.startswith("  "):
            answers.append((line[4:], line[2] == "="))
        else:
            answers = []
            yield line, answers


GOLDS = list(golds())


def test_the_table_has_both_kinds():
    verdicts = [equal for _, answers in GOLDS for _, equal in answers]
    assert len({gold for gold, _ in GOLDS}) == len(GOLDS) > 80
    assert min(verdicts.count(True), verdicts.count(False)) > 180


@pytest.mark.parametrize(("gold", "answers"), GOLDS)
def test_an_answer_is_the_gold_one_or_not(gold, answers):
    wrong = {
        answer: not equal for answer, equal in answers if score({"gold": gold, "answer": answer})["equal"] != equal
    }
    assert wrong == {}


@pytest.mark.parametrize("gold", [gold for gold, _ in GOLDS])
def test_a_gold_answer_can_be_graded_and_equals_itself_in_a_box(gold):
    assert check_gold({"payload": {"answer": gold}}) == {"error": "", "path": ""}
    assert score({"gold": gold, "answer": rf"So it is $\boxed{{{gold.strip('$')}}}$."})["equal"] is True


UNIVERSAL = r"""
x=x
0=0
1=1
x
n
yes
true
0
1
\mathbb{R}
\infty
\emptyset
{}
[]
()
?
...
\ldots
=
the answer
any number
NaN
None
inf-inf
0/0
\frac{0}{0}
\text{}
\boxed{}
\pm
-
%
$
\
x or y
a,b
0*x
x^0
|
\left.\right.
(-1)^n
""".strip().splitlines()


@pytest.mark.parametrize("answer", UNIVERSAL)
def test_no_answer_is_right_for_many_golds(answer):
    fits = [gold for gold, _ in GOLDS if score({"gold": gold, "answer": answer})["equal"]]
    assert len(fits) <= 2, fits


HOSTILE = [
    r"10^{10^{10}}",
    "9^9^9^9",
    r"2^{2^{2^{2^{2^{2}}}}}",
    "100000!",
    "((((9!)!)!)!)",
    r"e^{e^{e^{e^{9}}}}",
    "1e9999",
    r"\sin(10^{100})",
    "(" * 900 + "1" + ")" * 900,
    "{" * 1900,
    "-" * 1900 + "1",
    r"\frac" * 380 + "12",
    "x^" * 900 + "x",
    r"\sqrt" * 380 + "2",
    "1/" * 900 + "3",
    r"\binom{100000}{50000}",
    r"\sqrt[99999]{2}",
    "1," * 990 + "1",
    "|" * 1001,
    r"\pm" * 300 + "1",
    "!" * 1900,
    "x y " * 490,
    "a=b=" * 400 + "1",
    "1<x<" * 300,
    "[0,1]" + r"\cup[0,1]" * 200,
    "$" * 1900,
    "((x+1)^{300})^{300}",
    "x^{x^{x^{x^{x}}}}",
    "(1+1/x)^{10^5}",
    r"\text{a" * 200 + "}" * 200,
    "and " * 490,
    "**" * 900,
    r"\begin{pmatrix}" * 100 + "1" + r"\end{pmatrix}" * 100,
    r"\overline{" * 180 + "x" + "}" * 180,
    "1 1/2" * 300,
    "sin x " * 300,
    "mod 5" * 300,
    "0." + r"\overline{3}" * 130,
    "2 cm " * 390,
    "12:30" * 300,
    "f(" * 600,
    "\ud800",
]


@pytest.mark.parametrize("answer", HOSTILE)
def test_a_hostile_answer_is_wrong_and_nothing_else(answer):
    for gold in ("42", r"\frac{\sqrt2}{2}", "x^2+1", "(1,2)", "[0,1)", "even"):
        assert score({"gold": gold, "answer": answer})["equal"] is False


# --- where the answer is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Let me think. " * 400 + r"So it is \boxed{42}.", "42"),
        ("Let me think. " * 400 + "The answer is 42.", "42"),
        ("**Final Answer:**\n\\[\n18\n\\]", "18"),
        ("Final Answer:\n$$\n18\n$$", "18"),
        ("**Final Answer**\n\\[\n18\n\\]", "18"),
        ("<answer>18</answer>", "18"),
        ("Answer: <answer>17</answer> No: <answer>$18$</answer>", "$18$"),
        ("The answer is 18, as 9*2=18.", "18"),
        ("The answer is 18 because 9 x 2 is 18.", "18"),
        ("Answer: 18 (since 9*2 = 18)", "18"),
        ("The answer is 18 (9 × 2).", "18"),
        ("Answer: 18 dollars per day (2 × 9)", "18 dollars per day"),
        ("Answer: 18; checked", "18"),
        ("Answer: \n- 18", "18"),
        ("The answer is x = 3 (mod 7)", "x = 3 (mod 7)"),
        (r"\boxed{(2,2)} \text{ and } \boxed{(6,2)}", "(2,2), (6,2)"),
        (r"\boxed{1} \quad \text{and} \quad \boxed{2}", "1, 2"),
        (r"\boxed{1}. Or rather \boxed{2}", "2"),
        (r"\boxed{\left\{1,2\right\}}", r"\left\{1,2\right\}"),
        (r"\boxed{72} \boxed{}", "72"),
        (r"\boxed {72}", "72"),
        (r"\boxed 72.", "72"),
        (r"\fbox{72}", "72"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{2\boxed{5}}", r"2\boxed{5}"),
    ],
)
def test_the_final_answer_is_found(text, answer):
    assert find_final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "equal"),
    [
        ("So 2*9 = 18.", True),
        ("Total = 2*9 = 18 dollars", True),
        ("She sells 9 eggs and makes $18.", True),
        ("The value of the sum is $18$.", True),
        ("The answer is 17, not 18.", False),
        ("The answer is 18 or 19", False),
        ("Answer: 17 (18 is wrong)", False),
        ("The answer is between 17 and 18", False),
        ("For odd n the value is $18$.", False),
        ("There are 18 apples in 3 boxes.", False),
    ],
)
def test_prose_has_an_answer_only_if_it_is_the_one_number_in_it(text, equal):
    assert score({"gold": "18", "answer": text})["equal"] is equal


@pytest.mark.parametrize(
    "part",
    [
        "\\boxed{",
        "\\boxed",
        "\\fbox{",
        "{",
        "}",
        "\\boxed{1} and ",
        "answer is ",
        "answer\n",
        "<answer>",
        "####",
        " ",
        "1,000,",
        "-1",
        "$",
        "\\[",
        "(since ",
        " because",
        "\\boxed 7 ",
    ],
)
@pytest.mark.parametrize(("before", "after"), [("", ""), ("\\boxed{", ""), ("the answer is ", "}"), ("", "\\boxed{7}")])
def test_a_degenerate_turn_is_read_in_linear_time(part, before, after):
    """With a quadratic reader, these texts of 200,000 characters take minutes."""
    text = before + part * (200_000 // len(part)) + after
    boxed = extract_boxed(text)
    last_number(text)
    assert find_final_answer(text) is not None
    if after == "\\boxed{7}" and part not in ("\\boxed{1} and ",):
        assert boxed is not None
        assert boxed.endswith("7")


def test_only_the_end_of_a_long_turn_is_read():
    assert extract_boxed(r"\boxed{1}" + "x" * MAX_TAIL_CHARS) is None
    assert extract_boxed("x" * 10**6 + r"\boxed{1}") == "1"
    assert last_number("7 " + "x" * MAX_TAIL_CHARS) is None


# --- golds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gold",
    [
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72",
        r"Hence we have $\boxed{72}$.",
        "72",
        "yes",
        "Tuesday",
        "no solution",
        "(B)",
        r"\angle ABC",
        r"\overline{abc}",
        r"f(x)=2x \text{ for } x>0",
        r"5 \text{ for } n=1",
        r"12\text{ hours and }30\text{ minutes}",
        ["5", "five"],
        r"\text{Evelyn}",
        "1, 2, \\ldots, n",
        "St. Louis",
        "Mt. Everest in Nepal",
        "10 marbles remain in the bag",
        "even, odd and prime",
        "The answer is 5.",
    ],
)
def test_a_gold_answer_that_can_be_graded(gold):
    assert check_gold({"payload": {"answer": gold}}) == {"error": "", "path": ""}
    for one in gold if isinstance(gold, list) else [gold]:
        assert score({"gold": one, "answer": one})["equal"] is True


@pytest.mark.parametrize(
    ("gold", "part", "path"),
    [
        ("proof", "missing", "$.instance.payload.answer"),
        ("notfound", "missing", "$.instance.payload.answer"),
        ("", "missing", "$.instance.payload.answer"),
        ("$", "missing", "$.instance.payload.answer"),
        (r"\boxed{}", "missing", "$.instance.payload.answer"),
        (["5", "Proof."], "missing", "$.instance.payload.answer[1]"),
        (
            "We proceed by induction. Let $n$ be the number of sides, and suppose that it holds below.",
            "prose",
            "$.instance.payload.answer",
        ),
        (72, "no text", "$.instance.payload.answer"),
        ("#REF!", "missing", "$.instance.payload.answer"),
        ("<NA>", "missing", "$.instance.payload.answer"),
        ("#DIV/0!", "missing", "$.instance.payload.answer"),
        ("Step: 5+5 = 10. Therefore, there are 10 marbles.", "prose", "$.instance.payload.answer"),
        ("First 2+2 is 4, then add 1, so the result is 5", "prose", "$.instance.payload.answer"),
        ("Yes, because it is prime", "prose", "$.instance.payload.answer"),
        ("It is of x. Then it is so.", "prose", "$.instance.payload.answer"),
    ],
)
def test_a_gold_answer_that_cannot_be_graded_is_named_with_a_remedy(gold, part, path):
    found = check_gold({"payload": {"answer": gold}})
    assert part in found["error"]
    assert found["path"] == path


def test_a_gold_answer_in_a_worked_solution_is_found_as_an_answer_is():
    gold = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"
    assert score({"gold": gold, "answer": r"\boxed{72}"})["equal"] is True
    assert score({"gold": gold, "answer": "24"})["equal"] is False


def test_the_handler_names_the_check_of_its_golds():
    module, _, function = MathHandler.gold_check.partition(":")
    assert getattr(importlib.import_module(module), function) is check_gold
