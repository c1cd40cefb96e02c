"""Tables of answers to science questions with their verdicts, and of spellings of units."""

# ruff: noqa: RUF001, C408 - signs of many kinds, in tables
from __future__ import annotations

# fmt: off
CHOICES = [
    (["+", "-", "×", "÷"], "C", [
        "×", r"\times",
    ]),
    (["+", "-", "×", "÷"], "A", [
        "+",
    ]),
    (["+", "-", "×", "÷"], "B", [
        "-",
    ]),
    (["+", "-", "×", "÷"], "D", [
        "D",
    ]),
    (["<", ">", "=", "≤"], "A", [
        "<",
    ]),
    (["<", ">", "=", "≤"], "D", [
        r"$\leq$",
    ]),
    (["<", ">", "=", "≤"], "C", [
        "(C)", "=",
    ]),
    (["CO", "Co"], "A", [
        "CO", "a",
    ]),
    (["CO", "Co"], "B", [
        "Co",
    ]),
    (["CO", "Co"], None, [
        "co",
    ]),
    (["10 m", "1 m"], "A", [
        "'A'", "A,", "{A}", "10 m",
    ]),
    (["10 m", "1 m"], "B", [
        "1 m",
    ]),
    (["10 m", "1 m"], None, [
        "A. 1 m",
    ]),
    (["mW", "MW"], "B", [
        "MW",
    ]),
    (["mW", "MW"], "A", [
        "A. mW",
    ]),
    (["mW", "MW"], None, [
        "A. MW",
    ]),
    (["a sheet of paper", "iron", "a block of grass", "Iron (III) oxide", "none of these"], "C", [
        "C", "c", "(C)", "C.", "C)", "[C]", "**C**", "$C$", r"\boxed{C}", r"\text{C}", r"\boxed{\text{(C)}}",
        "The answer is C.", "Option C", "Answer: C", "the correct option is C", "C. a block of grass", "#### C",
        "a block of grass", "Block of grass.", "I first thought of B, but the answer is C.", "**Answer: C**",
        "The correct answer is **C**.", "C is correct", "C is right.", "(C) is the correct answer.", "It's C",
        "So C.", "Therefore, the answer is (C).", "C: a block of grass", "C - a block of grass", "C) Block of grass",
        "(c) a block of grass", "C a block of grass", "Final answer: C", "<answer>C</answer>",
        r"<answer>\boxed{C}</answer>", "Choice C is the best answer because grass is green.",
        "The answer is option C.", "the answer is: C", "C.\n", "ANSWER: C", "A block of grass", "the block of grass",
        r"\boxed{a block of grass}", r"\boxed{\text{C. a block of grass}}",
        r"\boxed{\textbf{(C)}\ \text{a block of grass}}", r"\textbf{(C)}", "The answer is C. It is made of grass.",
        "C, because it is green", "c) a block of grass", "option c", "`C`", "C。", "（C）", "I think the answer is C",
        "C. block", "answer c", "The correct answer is C, a block of grass.", "C (a block of grass)",
        "The answer is a block of grass.", "Option (C): a block of grass", "Answer is C",
        "(C) a block of grass, since it is green",
    ]),
    (["a sheet of paper", "iron", "a block of grass", "Iron (III) oxide", "none of these"], None, [
        "", " ", "A or C", "A, B, C, D, E", "ABCDE", "C. iron", "F", "Z", "not C", "A B C D", "C or", "1", "\x00",
        "all of them", "the block", "CC", "C C", "A and B", "A & B", "A/B", "A, B", "Both A and C", "A C",
        "either A or B", "C, or maybe B", "The answer is not C", "C is wrong", "C is incorrect",
        "C is not the answer", "none", "C. a block of grass, or D", "C. a block of grass or iron", "C? maybe",
        "I don't know", "C++", "C#", "C-", "A, but maybe C", "The answer is A or B.", r"\boxed{A} or \boxed{B}",
        r"\boxed{A}, \boxed{C}", r"\boxed{A,C}", "A; C", "(A)(C)", "(A) (B)", "A) iron", "(A) iron",
        "A. Iron (III) oxide", "Any of A, B, C", "B (or C)", "A|B", "A+B", "A\nB\nC", "B or C, because both",
        "Not A", "C. Not a block of grass", "A and sometimes C", "<answer>A</answer><answer>B or C</answer>",
        "D. iron oxide",
    ]),
    (["a sheet of paper", "iron", "a block of grass", "Iron (III) oxide", "none of these"], "B", [
        "iron", "B. iron", "The answer is A. No wait, B.",
    ]),
    (["a sheet of paper", "iron", "a block of grass", "Iron (III) oxide", "none of these"], "D", [
        "D. Iron (III) oxide", "Iron (III) oxide",
    ]),
    (["a sheet of paper", "iron", "a block of grass", "Iron (III) oxide", "none of these"], "E", [
        "None of these", "E. None of these", "none of these.",
    ]),
    (["a sheet of paper", "iron", "a block of grass", "Iron (III) oxide", "none of these"], "A", [
        "A sheet of paper", "a", "A. sheet of paper",
    ]),
    (["Red", "Green", "Blue"], None, [
        "A Green", "A. Green", "A: Green", "a) Green", "A - Green", "Option A: Green", "A (Green)",
        r"\boxed{A: Green}", "red or green", "Red, Green", "not red", "A is Green", "x", "A) Green",
        "The answer is (A) Green", "(C) Red",
    ]),
    (["Red", "Green", "Blue"], "B", [
        "Green", "a green", "The answer is Green",
    ]),
    (["Red", "Green", "Blue"], "A", [
        "Red.",
    ]),
    (["A", "B", "AB", "O"], "C", [
        "AB",
    ]),
    (["A", "B", "AB", "O"], "D", [
        "O",
    ]),
    (["B", "A", "AB", "O"], "A", [
        "A",
    ]),
    (["x", "a", "b"], None, [
        "a",
    ]),
    (["x_1", "x^1"], None, [
        "x1",
    ]),
    (["x_1", "x^1"], "A", [
        "x_1",
    ]),
    (["x_1", "x^1"], "B", [
        "$x^{1}$",
    ]),
    (["$x_1$", "$x_2$"], "B", [
        "x₂",
    ]),
    (["iron", "Iron.", "gold"], "A", [
        "iron",
    ]),
    (["iron", "Iron.", "gold"], "B", [
        "Iron.",
    ]),
    (["iron", "Iron.", "gold"], None, [
        "IRON",
    ]),
    (["same", "same", "x"], None, [
        "same",
    ]),
    (["same", "same", "x"], "B", [
        "B", "B. same",
    ]),
    (["It is stable", "It is not stable"], None, [
        "B. It is stable",
    ]),
    (["It is stable", "It is not stable"], "A", [
        "A. It is stable",
    ]),
    (["It is stable", "It is not stable"], "B", [
        "It is not stable",
    ]),
    (["stable", "not stable"], None, [
        "A. not stable",
    ]),
    (["0", "4", "2", "6"], "B", [
        "B", "4",
    ]),
    (["0", "4", "2", "6"], "C", [
        "C. 2",
    ]),
    (["0", "4", "2", "6"], None, [
        "C. 4", "A. 0.5",
    ]),
    (["1", "10"], None, [
        "A. 10",
    ]),
    (["True", "False"], "A", [
        "true",
    ]),
    (["Yes", "No"], "B", [
        "No", "no", "B. No",
    ]),
    (["Yes", "No"], None, [
        "A. No",
    ]),
    (["I only", "II only", "I and II"], "C", [
        "I and II", "C. I and II",
    ]),
    (["A and B", "C and D"], "A", [
        "A and B",
    ]),
    (["Both A and B", "A only", "B only"], "A", [
        "Both A and B", "A. Both A and B",
    ]),
    (["Both A and B", "A only", "B only"], "B", [
        "A only",
    ]),
    (["3.0 × 10^8 m/s", "3.0 × 10^6 m/s"], "A", [
        r"$3.0 \times 10^{8}$ m/s",
    ]),
    ([r"$\frac{1}{2}$", r"$\frac{1}{3}$"], "A", [
        "1/2",
    ]),
    ([r"$\frac{1}{2}$", r"$\frac{1}{3}$"], "B", [
        r"\boxed{\frac{1}{3}}",
    ]),
    (["Ca^{2+}", "Ca^{3+}"], "A", [
        "Ca2+",
    ]),
    (["p > 0.05", "p < 0.05"], "B", [
        "p<0.05",
    ]),
    (["5%", "5"], "B", [
        "5",
    ]),
    (["5%", "5"], "A", [
        r"5\%",
    ]),
    (["-5", "5"], "A", [
        "−5",
    ]),
    (["O(n)", "O(n^2)"], "B", [
        "O(n²)",
    ]),
    (["$x_1$", "$x_2$", r"$\frac{1}{2}$", "CH_3*OH"], "A", [
        "A. $x_1$", "(A) $x_1$", "$x_1$", r"\boxed{A. $x_1$}", "The answer is A. $x_1$",
    ]),
    (["$x_1$", "$x_2$", r"$\frac{1}{2}$", "CH_3*OH"], "B", [
        "B. $x_2$", "(B) $x_2$", "$x_2$", r"\boxed{B. $x_2$}", "The answer is B. $x_2$",
    ]),
    (["$x_1$", "$x_2$", r"$\frac{1}{2}$", "CH_3*OH"], "D", [
        "D. CH_3*OH",
    ]),
    (["A low risk", "Only environment", "Degree 3", "Degree 4", "A polygenic risk score"], "E", [
        r"\boxed{E: A polygenic risk score computed from GWAS}", r"\boxed{E: polygenic}",
        r"\boxed{C} ... no: \boxed{E}",
    ]),
    (["A low risk", "Only environment", "Degree 3", "Degree 4", "A polygenic risk score"], None, [
        r"\boxed{E: A low risk}", "ANSWER: A, B", "I don't know", "I considered (A), but it is incorrect.",
    ]),
    (["A low risk", "Only environment", "Degree 3", "Degree 4", "A polygenic risk score"], "D", [
        r"The energy is \boxed{\langle H\rangle} ... **Answer: D**", r"\boxed{<D>}",
    ]),
    (["A low risk", "Only environment", "Degree 3", "Degree 4", "A polygenic risk score"], "B", [
        "Answer: B, because it depends on the environment.", "So the correct choice is **(B)**.",
        "Option B is correct.", "B is the correct answer", "I choose B", "<answer>B</answer>", "（B）",
    ]),
    (["mitosis", "meiosis", "binary fission", "budding"], "B", [
        "B", "meiosis", "Meiosis", "B) meiosis", "(B) Meiosis.", "The answer is meiosis.", "Answer: meiosis",
        r"\boxed{\text{meiosis}}", r"\boxed{B) \text{meiosis}}", "**B) Meiosis**", "**B**: Meiosis",
        "B. **Meiosis**", "The correct answer is **B) meiosis**.",
        "The correct answer is B) meiosis because it halves the chromosomes.", "I believe the answer is B.",
        "Therefore, the correct option is B.", "Hence, B is correct.", "B is the right choice.",
        "The best option is B.", "Out of the options, the answer is B.", r"$\boxed{\text{B}}$",
        "Final Answer: **B**", "Final answer: (B) meiosis", "### Answer: B", "### Final Answer\n\n\\boxed{B}",
        "Answer is (B).", "answer = B", "The answer:\nB", "Answer:\n\nB. meiosis", "[B]", "<B>", "B\n\n", "  B  ",
        "b.", "b) meiosis", "option (b)", "Option B: meiosis", "Choice: B", "The correct choice is B: meiosis",
        "The correct statement is B.", "The letter is B", "It's B.", "It is (B) meiosis.", "B is the answer.",
        "B (meiosis)", "meiosis (B)", "B — meiosis", "B – meiosis", "B - meiosis", "B, meiosis", "B; meiosis",
        "B: Meiosis, which halves the chromosome number", "B. Meiosis. This process halves the chromosome number.",
        "The answer is B. Meiosis halves the chromosomes.", "The answer is B, since meiosis halves.",
        "The answer is B (since meiosis halves the number).", "So, the answer is: **B**", r"\textbf{B}",
        r"\mathbf{B}", r"\mathrm{(B)}", r"\text{Option B}", r"\boxed{\text{Option B}}",
        r"\boxed{\text{(B) meiosis}}", "$B$", r"\(B\)", r"\[\boxed{B}\]", "Ｂ", "“B”", "‘B’", '"B"', "'B'", "B!",
        "Answer：B", "I select option B.", "We choose B.", "I would pick B", "My choice is B",
        "My final answer is B.", "So B is the correct option.", "The answer must be B", "The answer would be B.",
        "The answer should be (B)", "Correct answer: B", "Correct option: B", "Answer (B)", "Answer B", "ANSWER: B",
        "The Answer Is B.",
    ]),
    (["mitosis", "meiosis", "binary fission", "budding"], None, [
        "mitosis and meiosis", "mitosis/meiosis", "B/C", "B,C", "B & C", "B and C", "B or C", "BC", "B C", "(B),(C)",
        "B. mitosis", "(A) meiosis", "not meiosis", "either meiosis or mitosis", "It is not B", "B isn't correct",
        "B is not correct.", "Not sure, maybe B", "Maybe B", "Perhaps B or C", "Could be B", "B?", "B? or C?",
        "Probably B, possibly C", "all of the above", "none", "E", "F. meiosis", "A: meiosis", "C) mitosis",
        "The answer is A or B", "The answer is A, B", "The answer is between A and B", "Definitely not C", "A B",
        "A\nB", "A. B.", "A=B", "A->B", "2", "II", "osis", "mei", "binary", "The answer is unclear", "B but also C",
        "B, C", "B then C", "B>C", r"\boxed{B\text{ or }C}", r"\boxed{BC}", r"\boxed{B, C}", r"\boxed{}",
        r"\boxed{B}\boxed{C}", r"\boxed{A}\text{ and }\boxed{B}", r"\boxed{A} or \boxed{B}", r"\boxed{A}/\boxed{B}",
        "It could be A. It could be B.", "A is wrong, B is wrong", "anything but A", "except B",
        "Everything except B", "B is false",
    ]),
    (["$E=mc^2$", "$E=mc^3$", r"$E=\frac{1}{2}mv^2$", "$E=mgh$"], "A", [
        "$E=mc^2$", "E=mc^2", "E = mc^2", "E=mc²", "A. $E = mc^2$", r"\boxed{E=mc^2}", r"\boxed{A}", r"\(E=mc^2\)",
        "The answer is $E = mc^2$.", "E=mc^{2}", "A) E=mc²",
    ]),
    (["$E=mc^2$", "$E=mc^3$", r"$E=\frac{1}{2}mv^2$", "$E=mgh$"], "C", [
        r"E=\frac{1}{2}mv^2", r"$E = \frac12 mv^2$", "C", r"C. $E=\frac{1}{2}mv^2$",
    ]),
    (["$E=mc^2$", "$E=mc^3$", r"$E=\frac{1}{2}mv^2$", "$E=mgh$"], None, [
        "E=mc", "E=mc^4", "A. E=mc^3", "E=mc2^2", "E=mc^2^3", "mgh",
    ]),
    (["5 N", "10 N", "15 N", "20 N"], "B", [
        "10 N", "B. 10 N", "10N", r"$10\,\text{N}$", r"10\ \mathrm{N}", "B: 10 N", r"\boxed{10\text{ N}}", "B",
        "B) 10 N",
    ]),
    (["5 N", "10 N", "15 N", "20 N"], None, [
        "10", "0 N", "B. 5 N", "B. 20 N", "110 N", "-10 N", "1 0 N", "10 N or 15 N", "B. 10 N or 15 N", "25 N",
        "5 N + 5 N",
    ]),
    (["The rate increases", "The rate decreases", "The rate is unchanged", "Cannot be determined"], "B", [
        "The rate decreases", "the rate decreases.", "B. The rate decreases", "B. rate decreases", "B. decreases",
        "The rate decreases because of friction.", "B: The rate decreases as temperature falls", "B",
    ]),
    (["The rate increases", "The rate decreases", "The rate is unchanged", "Cannot be determined"], None, [
        "The rate", "decreases and increases", "B. The rate increases", "B. increases", "The rate does not decrease",
        "The rate decreases or increases", "B. The rate is unchanged", "It does not decrease",
        "B. The rate does not decrease", "B. not decreases",
    ]),
    (["The rate increases", "The rate decreases", "The rate is unchanged", "Cannot be determined"], "D", [
        "Cannot be determined", "D. Cannot be determined", "D: cannot be determined.", "D",
    ]),
    (["No", "Yes", "Maybe"], "A", [
        "No", "no", "A. No", "NO", "A",
    ]),
    (["No", "Yes", "Maybe"], "C", [
        "Maybe", "maybe", "C. Maybe",
    ]),
    (["No", "Yes", "Maybe"], "B", [
        "Yes", "B",
    ]),
    (["No", "Yes", "Maybe"], None, [
        "No, yes", "Yes or no", "A. Yes", "B. No", "yes no",
    ]),
    (["α", "β", "γ"], "B", [
        "β", r"\beta", "beta", r"$\beta$", "B. β", "B", r"\boxed{\beta}",
    ]),
    (["α", "β", "γ"], None, [
        "α β", "b.a",
    ]),
    (["ΔH > 0", "ΔH < 0", "ΔH = 0"], "A", [
        "ΔH > 0", r"$\Delta H > 0$", r"\Delta H>0", "A. ΔH > 0",
    ]),
    (["ΔH > 0", "ΔH < 0", "ΔH = 0"], "B", [
        "ΔH < 0", r"\boxed{\Delta H < 0}",
    ]),
    (["ΔH > 0", "ΔH < 0", "ΔH = 0"], None, [
        "ΔH", "ΔH 0", "A. ΔH < 0", "ΔH ≤ 0",
    ]),
    (["Na+", "Na", "Na-"], "A", [
        "Na+", "Na^+", r"$\text{Na}^+$", "Na⁺", "A. Na+",
    ]),
    (["Na+", "Na", "Na-"], "B", [
        "Na", "B. Na",
    ]),
    (["Na+", "Na", "Na-"], "C", [
        "Na-", "Na^-", "Na⁻",
    ]),
    (["Na+", "Na", "Na-"], None, [
        "A. Na", "B. Na+", "C. Na+", "N",
    ]),
    (["1s2 2s2", "1s2 2s1"], "A", [
        "1s^2 2s^2", "$1s^2 2s^2$", "A. 1s² 2s²",
    ]),
    (["a", "an", "the"], "C", [
        "the", "C",
    ]),
    (["a", "an", "the"], "B", [
        "an", "b",
    ]),
    (["a", "an", "the"], "A", [
        "a", "A",
    ]),
    (["I", "II", "III", "IV"], "B", [
        "II", "B",
    ]),
    (["I", "II", "III", "IV"], "A", [
        "A", "I",
    ]),
    (["I", "II", "III", "IV"], "C", [
        "III", "C. III",
    ]),
    (["I", "II", "III", "IV"], None, [
        "I and II", "I, II",
    ]),
    (["I and II", "I only", "III"], "A", [
        "I and II", "A. I and II", "I & II",
    ]),
    (["I and II", "I only", "III"], "B", [
        "I only", "B. I only",
    ]),
]
"""Choices, the letter that is named (None for none), and answers."""

QUANTITIES = [
    (dict(answer=9.8, unit="m/s^2"), True, [
        "9.8", "9.8 m/s²", "9.8 m/s/s", "9.8 m·s⁻²", "9.8 m*s^-2", "9.8 m s-2", "9.8 N/kg", "980 cm/s^2",
        "9.8 metres per second per second", "9.8 meters/second^2", r"9.8 \frac{m}{s^2}",
        r"9.8\ \frac{\text{m}}{\text{s}^2}", r"$9.8\,\mathrm{m}/\mathrm{s}^{2}$", r"\boxed{9.8\ \text{m/s}^2}",
        "a = 9.8 m/s^2", "The acceleration is 9.8 m/s^2.", "approximately 9.8 m/s^2", "9.8 m/(s^2)", "9.8 m/sec^2",
        "9.8m/s^2", "g = 9.80 m/s^2", r"a = \frac{F}{m} = 9.8\ \text{m/s}^2",
        r"\qty{9.8}{\metre\per\second\squared}", r"\SI{9.8}{\m\per\s\squared}", r"9.8\,\si{m/s^2}",
        "9.8 meter per square second", "0.0098 km/s^2", "Answer: 9.8 m/s^2", "**9.8 m/s²**",
        r"\(9.8 \text{ m/s}^2\)", "(9.8 m/s^2)", "The answer is 9.8 m/s^2, because g is constant.", "+9.8 m/s^2",
        "9.8 (m/s^2)", "9.8 [m/s^2]", "32.15 ft/s^2",
    ]),
    (dict(answer=9.8, unit="m/s^2"), False, [
        "-9.8 m/s^2", "9.8 m/s", "9.8 m", "9.8 s^2/m", "9.8 km/s^2", "98 m/s^2", "9.8 or 10.8 m/s^2",
        "9.8 m/s^2 or 10 km/s^2", "9.8 to 10 m/s^2", "9-10 m/s^2", "not 9.8", "9.8, 9.9", "9.8 m/s^2 and 5",
        "9.8 = 5", "5 = 9.8", "9.8 m/s^2 = 5 m/s^2", "9.8 (5) m/s^2", "9.8 m/s^2 (5 m/s^2)", "9.8...", "9.8 m/s^2?",
        "more than 9.8", "> 9.8", r"\ge 9.8", "9.8x", "9.8 x 2", "9.8!", "9.8%", "9.8 foo", "foo", r"9.8 \pm 3",
        "{9.8, 9.9}", "[9.8, 9.9]", "between 9.7 and 9.9", "9.8 m/s^2 * 2", "2*4.9", "4.9+4.9", "9.8 9.8",
        "9.8; 9.8", "|9.8|i", "√(9.8)", "9.8^2", "9.8e", "9.8e1", "half of 9.8", "9.8/2", "log 9.8", "-(9.8)",
        "9.8 m/s^2 if it is large", "it may be 9.8", "maybe 9.8", "9.8 m/s^2 minus 3", "1/9.8", "9.8 + 1", "9.8 + i",
        "9.8i",
    ]),
    (dict(answer=25, unit="degC", relative_tolerance=0.001), True, [
        "25", "25 °C", "25°C", "25 ° C", "25 ºC", r"25^\circ\text{C}", r"25^{\circ}C", r"25\,^{\circ}\mathrm{C}",
        r"25^\circ \mathrm{C}", r"25\degree C", r"25 ^\circ C", "25 degrees Celsius", "25 degrees celsius",
        "25 degree Celsius", "25 deg C", "25 degC", "25 Celsius", "25 celsius", "25 degrees C", "25 C", "298.15 K",
        "77 °F", "77 degrees Fahrenheit", "77 F", "25 centigrade", r"\SI{25}{\celsius}", r"\SI{25}{\degreeCelsius}",
        "25 ℃", "T = 25 °C", "25 deg. C", "25 Degrees Celsius", "25 °C.",
    ]),
    (dict(answer=25, unit="degC", relative_tolerance=0.001), False, [
        "25 K", "25 °F", "25 degrees", "25°", "298 F", "-25 °C", "25 rad", "25 coulombs", "25 kelvin",
    ]),
    (dict(answer=298.15, unit="K", relative_tolerance=0.0001), True, [
        "298.15 K", "25 °C", "298.15", "298.15 kelvin", "298.15 Kelvin", "298.15 kelvins", "298.15 Kelvins",
    ]),
    (dict(answer=3.97e-19, unit="J"), True, [
        "3.97e-19 J", "3.97E-19 J", "3.97 × 10^-19 J", "3.97 x 10^-19 J", "3.97 X 10^-19 J", "3.97*10^-19 J",
        "3.97*10**-19 J", "3.97 10^-19 J", "3.97·10⁻¹⁹ J", "3.97 × 10⁻¹⁹ J", r"3.97 \times 10^{-19}\,\text{J}",
        r"3.97\cdot10^{-19} \mathrm{J}", "3.97 * 10^(-19) J", "2.478 eV", "3.97×10^{-19}J", "E = hc/λ = 3.97e-19 J",
        r"E = \frac{hc}{\lambda} = 3.97 \times 10^{-19}\ \text{J}", "2.48 eV (3.97e-19 J)", "3.97e-19 J = 2.48 eV",
        "3.97e-19 J ≈ 2.48 eV", "0.397 aJ", r"E = h\nu = 3.97\times 10^{-19}\text{ J}", "3.97 × 10 ^ -19 J",
        r"\num{3.97e-19} J", r"\SI{3.97e-19}{\joule}",
    ]),
    (dict(answer=3.97e-19, unit="J"), False, [
        "3.97e-18 J", "3.97 × 10^19 J", "3.97", "3.97 10 -19 J", "1e-7", "0", "-3.97e-19", "3.97e-19 eV",
        "3.97 × 10-19 J", "9.1e-31 J",
    ]),
    (dict(answer=1234.5, unit="", relative_tolerance=1e-09), True, [
        "1234.5", "1,234.5", "1 234.5", r"1\,234.5", "1{,}234.5", "1.2345e3", "1.2345 × 10^3", "1_234.5", "1234.50",
        r"1.2345 \times 10^3",
    ]),
    (dict(answer=1234.5, unit="", relative_tolerance=1e-09), False, [
        "1.234,5", "1,2345", "12,34.5", "1234,5", "1 2345", "12 34.5", "1.234.5",
    ]),
    (dict(answer=0.5, unit="", relative_tolerance=1e-09), True, [
        "1/2", r"\frac12", r"\frac{1}{2}", r"\dfrac{1}{2}", "0.5", ".5", "50%", "50 percent", "½", "0.50", "5e-1",
        r"\tfrac{1}{2}", "1 / 2", "2/4", "3/6", "5 × 10^-1",
    ]),
    (dict(answer=0.5, unit="", relative_tolerance=0.001), False, [
        "-1/2", "2/1", "1/3", "0.5 m", "5", "1 1/2", "1:2",
    ]),
    (dict(answer=3.14159265, unit="", relative_tolerance=1e-06), True, [
        r"\pi", "π", "pi", "math.pi", "np.pi", "3.14159265",
    ]),
    (dict(answer=6.2831853, unit="", relative_tolerance=1e-06), True, [
        r"2\pi", "2π", "2*pi", "2 π", "2*π", r"2 \pi", "2*math.pi",
    ]),
    (dict(answer=1.5707963, unit="", relative_tolerance=1e-06), True, [
        r"\pi/2", "π/2", r"\frac{\pi}{2}", r"\frac12\pi", "pi/2", r"\frac{1}{2}\pi", "0.5π",
    ]),
    (dict(answer=1.41421356, unit="", relative_tolerance=1e-06), True, [
        r"\sqrt{2}", "√2", "sqrt(2)", "2^0.5", "2**0.5", r"\sqrt2", "2^{1/2}", "2**(1/2)", "math.sqrt(2)",
        "np.sqrt(2)",
    ]),
    (dict(answer=0.8660254, unit="", relative_tolerance=1e-06), True, [
        r"\frac{\sqrt{3}}{2}", "√3/2", "sqrt(3)/2", r"\sqrt{3}/2",
    ]),
    (dict(answer=1.6180339887, unit="", relative_tolerance=1e-06), True, [
        r"\frac{1+\sqrt{5}}{2}", "(1+√5)/2", "(1+sqrt(5))/2",
    ]),
    (dict(answer=3.14159, unit=""), False, [
        r"-\pi", r"\pi^2", "2π", "π or e", "π+1", "3 or π",
    ]),
    (dict(answer=-5, unit="m"), True, [
        "-5 m", "−5 m", "minus 5 m", "negative 5 m", "-5.0 m", r"-5\,\text{m}", "x = -5 m", "–5 m", "- 5 m",
    ]),
    (dict(answer=-5, unit="m"), False, [
        "5 m", "--5 m", "5 - 10 m", "0 - 5 m",
    ]),
    (dict(answer=500, unit="nm"), True, [
        "500 nm", "0.5 µm", "5000 Å", "5e-7 m", r"\lambda = 500\ \text{nm}", "λ = 500 nm",
        "The wavelength of the light is 500 nm.", "500 nm (5 × 10^-7 m)", "500nm", "It is 500 nm",
        "Wavelength: 500 nm", "λ₁ = 500 nm", r"$\lambda_{\max} = 500\,\mathrm{nm}$", "500 nm or 0.5 µm",
        "about 500 nm", "~500 nm", "≈ 500 nm", "= 500 nm", "500. nm", "500 nm, since E = hc/λ",
        "The wavelength is approximately 500 nm.", "So the wavelength is 500 nm", "We get 500 nm", "λ ≈ 500 nm",
        "roughly 500 nanometers", "500 Nanometers", "500 nanometres", "500 nm.", r"\boxed{500 \text{ nm}}",
        r"\boxed{500}\text{ nm}", r"\boxed{500} nm", r"\boxed{0.5}\ \mu\text{m}", "λ_max = 500 nm (0.5 μm)",
        "Δλ = 500 nm", r"The answer is \boxed{500} nm.", r"$\boxed{500}$ nm", r"\boxed{\lambda = 500\ \text{nm}}",
        r"Therefore the answer is \boxed{500\,\text{nm}}.", "It is 500 nm. This is green light.",
        "<answer>500 nm</answer>",
    ]),
    (dict(answer=500, unit="nm"), False, [
        "500 m", r"\boxed{500} m", r"\boxed{500}\text{ m}", "500 nm or 600 nm", "500 nm = 600 nm", "500 nm (600 nm)",
        "500, 600", "500 nm to 600 nm", "500-600 nm", "500–600 nm", "not 500 nm", "500 nm and 600 nm",
        "less than 500 nm", "500 nm. Or 600 nm.", "1", r"\boxed{500 nm} or \boxed{600 nm}",
        r"\boxed{600 nm}, \boxed{500 nm}", "500 nm² ", "500 Hz", "500 NM", "500 Nm", "500 nM",
    ]),
    (dict(answer=2000, unit="µg"), True, [
        "2 mg", "2,000 µg", "2 000 µg", r"2\,000\ \mu g", "2000 mcg", "2000 ug", "2e3 µg", "0.002 g",
        "2000 micrograms", "2.000 mg",
    ]),
    (dict(answer=6.022e+23, unit="1/mol"), True, [
        "6.022e23 /mol", "6.022e23 mol^-1", "6.022 × 10^23 per mole", "6.022e23 atoms/mol", "6.022 × 10²³ mol⁻¹",
        r"6.022 \times 10^{23}\ \text{mol}^{-1}", "6.022e23",
    ]),
    (dict(answer=5.2, unit=""), True, [
        "pH 5.2", "pH = 5.2", "5.2", "pKa = 5.2", "The pH is 5.2", "pH: 5.2", "pH ≈ 5.2",
    ]),
    (dict(answer=0, unit="m", absolute_tolerance=0.01), True, [
        "0", "0 m", "0.0 m", "0 cm",
    ]),
    (dict(answer=1, unit="Hz"), True, [
        "1 Hz", "60 rpm", "1 s^-1", "1 /s",
    ]),
    (dict(answer=60, unit="rpm"), True, [
        "60 rpm", "1 Hz", "1 rev/s", "6.2832 rad/s", "1 rps", "1 revolution per second",
    ]),
    (dict(answer=5000000.0, unit="yr"), True, [
        "5 million years", "5e6 years", "5 × 10^6 yr", "5,000,000 years", "5 Myr",
    ]),
    (dict(answer=12, unit=""), True, [
        "12 atoms", "12 electrons", "12 photons", "12",
    ]),
    (dict(answer=66, unit="s"), True, [
        "1.1 min",
    ]),
    (dict(answer=8.314, unit="J/(mol K)"), True, [
        "8.314 J/mol/K", "8.314",
    ]),
    (dict(answer=1, unit="km"), True, [
        "1000 m", "1 km", "0.6214 miles", "1e3 m", "3280.84 ft",
    ]),
    (dict(answer=100, unit="kPa"), True, [
        "1 bar", "100 kPa", "0.986923 atm", "750.06 mmHg", "14.5 psi", "1e5 N/m^2",
    ]),
    (dict(answer=5, unit="m"), True, [
        "5 meters long", "5 m tall", "5m.", "~ 5 m", "≈5 m", "x=5m", "$x = 5$ m", r"$x=5\,m$",
        r"x = 5\text{ meters}", r"\boxed{5}\,\text{m}", "The length is 5 meters", "length = 5 m", "L=5.0m", "5 m",
        "The object moves 5 m.", "It travels 5 m", "d ≈ 5.0 m", "5.00 × 10^0 m", "+5 m", r"$$5\ \mathrm{m}$$",
        r"\[5\ \mathrm{m}\]", r"$\displaystyle 5\text{ m}$", "**5 m**", "**5** m", "`5 m`", "*5 m*", r"5 \mbox{ m}",
        r"5 \textrm{ m}", r"5 \ m", "5~m", "5 m", "5 m", r"5 {\rm m}", r"5 \mathrm m", r"5\;\mathrm{m}",
        r"\mathrm{5\ m}", r"\text{5 m}", "5 m^1", "0.005 km", "5e0 m", "500 cm", "5 metres", "5 Meter",
        r"\left(5\right)\text{ m}", r"5 m \approx 16.4 ft", r"\frac{10}{2} m", r"\frac{10}{2}\ \text{m}", "10/2 m",
        "Answer: **5 m**", r"Final answer: $5\,\mathrm{m}$", "So, d = 5 m.", "d = 5 m, which is 500 cm",
        "5 m ≈ 16.4 ft", "5 m (16.4 ft)", "5 m, or 500 cm", "5 m (i.e., 500 cm)", "5 m (approximately 16.4 ft)",
        r"The answer is $\boxed{5\ \text{m}}$.", "The answer is 5 metres.", "I get 5 m", "I found 5 m", "is 5 m",
        "The value of d is 5 m", "d_1 = 5 m", "d_{1} = 5 m", "d₁ = 5 m", "d' = 5 m", "|d| = 5 m",
        r"\Delta x = 5\text{ m}", r"\vec{d} = 5 m", r"\bar{x} = 5 m", r"\langle x \rangle = 5 m", "d(t) = 5 m",
        "d(2) = 5 m", "x = 5 m", r"r_{\text{max}} = 5\,\text{m}", r"r_\mathrm{max} = 5\,\mathrm{m}",
        r"d \approx 5\ \text{m}", r"d \simeq 5\ \text{m}", r"d\sim 5\,\text{m}", "d = 5 m", "d == 5 m",
    ]),
    (dict(answer=5, unit="m"), False, [
        "5 m 6 m", "5 m wide or 6 m", "about 5 or 6 m", "5 m ± 6 m", "5|6", "5 m/6 m", "5 m 10 cm",
        "x = 5 m, x = 6 m", "x=5 m; y=6 m", "5 m < x", "5 m to the 6th", "5m^0", "5·6 m", "(5)(6) m", "5 mm", "5 Mm",
        "5 m²", "5 m·s", "5 per m", "5/m", "m=5=6 m", "5 m = 6", "6 m = 5 m", "x = 5 ≈ 6 m", "[5] [6]", "5..6",
        "5 ... 6", "5−6 m", "5:6", "5 > 4 m", "5 m isn't right", "never 5 m", "5 m is wrong", "it's not 5 m",
        "5 m no", "5 m? no", "unlikely 5 m", "5 m or less", "5 m or more", "at most 5 m", "up to 5 m", "5 m min",
        "over 5 m", "5+ m", "<5 m", "≤5 m", "≥ 5", "±5 m", r"\pm 5 m", r"5 m \text{ or } 6 m", "5 or 6", r"\{5, 6\}",
        "5, then 6", "5 m then 6 m", "0.5e1e1", "5e", "5**1**1", "5^1^1", "--5", "((5", "5 A", "5 ms", "5 min",
        "5 mol", "5 mi", "5 M", "5 in", "5 ft", "5 yd", "5 px", "5 m/m", "5 rad", "5 deg", "5 %", "5 dB",
        "5 m or 5 km", "5 km (5 m)", "5 m (5 km)", "5 m (6)", "5 km = 5 m", r"\boxed{5} km",
        r"\boxed{5} or \boxed{6}", r"\boxed{6} or 5", "5 m 5 km", "500", "0.005", "5 000", "5,000 m", "5 K", "5_m",
        "5_6", "5#", "5@", "5&6", "5 and 6 m", "5\n6", "5 m\n6 m", "Between 5 m and 6 m", "not 5 m but 6 m",
        "5 × 10 m", "5 * m * m", "0x5 m", "5mm", "5 m.m", "", "5 m minus 1", "5 m plus 1 m", "5 m times 2",
        "twice 5 m", "5 m squared", "5 m cubed", "square root of 5 m", "5 m per second", "1/5 m", "5!m", "5i m",
        r"5 \cdot m^{2}", "5 m; not", "The answer is 6 m, not 5 m.", "The answer is not 5 m", "5 m, no wait, 6 m",
        "The answer is 5 m. Actually 6 m.", "I would say 5 m or 6 m", "5 m if x else 6 m", "The answer could be 5 m",
        "5 to 5.1 m", r"5 m \to 6 m", r"5 \ne 6 m", r"6 \ne 5 m", "5 m (not 6 m)", "{5}{6} m", "5{6} m", r"5\,6 m",
        "5 6 m", "5.5.5", "1e1000 m", "5 m + C", "5k", "5K m",
    ]),
    (dict(answer=1.5e-05, unit="1/K"), True, [
        "1.5e-5 K^-1", "1.5 × 10⁻⁵ /K", "1.5e-5 /°C", "1.5 × 10^-5 per kelvin", "1.5e-5 °C⁻¹",
        r"1.5\times10^{-5}\,\text{K}^{-1}", "1.5e-5 (°C)^-1", "1.5e-5 K^{-1}",
    ]),
    (dict(answer=4186, unit="J/(kg K)", relative_tolerance=0.01), True, [
        "4186 J/kg·K", "4186 J/(kg·°C)", "4.186 kJ/(kg·K)", "4186 J/kg/K", "4186 J kg^-1 K^-1", "4.186 J/g°C",
        "4.186 J/(g·°C)", "1 cal/(g °C)", "4186 J/kg °C", "4186 J/kgK", "4.186 J/(g °C)",
        r"4186 \frac{J}{kg\cdot K}", r"4186 \text{ J/(kg}\cdot\text{K)}", r"4.186 \text{ J/g}^\circ\text{C}",
        "4.186 J g⁻¹ °C⁻¹",
    ]),
    (dict(answer=0.0821, unit="L atm/(mol K)"), True, [
        "0.0821 L·atm/(mol·K)", "0.0821 L atm mol^-1 K^-1", "0.0821 L atm / mol K", "0.0821 L-atm/mol-K",
        "0.0821 liter atmospheres per mole kelvin", "8.314 J/(mol K)",
    ]),
    (dict(answer=6.626e-34, unit="J s"), True, [
        "6.626e-34 J·s", "6.626 × 10⁻³⁴ J s", "6.626e-34 Js", "6.626e-34 joule-seconds", "6.626e-34 J*s",
        "6.626e-34 J-s", "6.626e-34 kg m^2/s", "4.136e-15 eV s", "4.136e-15 eV·s",
    ]),
    (dict(answer=9000000000.0, unit="N m^2/C^2"), True, [
        "9e9 N·m²/C²", "9 × 10^9 N m^2 C^-2", "9e9 N*m^2/C^2", r"9\times10^9\ \text{N}\cdot\text{m}^2/\text{C}^2",
        "9e9 N·m^2·C^-2", r"9 \times 10^{9} \mathrm{N \, m^2 / C^2}", "9e9 V m/C",
    ]),
    (dict(answer=300000000.0, unit="m/s"), True, [
        "3e8 m/s", "300,000 km/s", "3.0 x 10^8 meters per second", "2.998e8 m/s", "300000 km per second",
        "3.00E+08 m/s", "3.00e+8 m/s", "1 c",
    ]),
    (dict(answer=0.05, unit=""), True, [
        "5%", "0.05", "5 percent", r"5\%", "1/20", "5e-2", "5 × 10^{-2}", r"\frac{1}{20}",
    ]),
    (dict(answer=36, unit="km/h"), True, [
        "10 m/s", "36 km/hr", "36 kph", "36 km per hour", "36 kilometers per hour", "36 km h^-1", "22.37 mph",
        "36 km/hour", "36 kilometres/hour",
    ]),
    (dict(answer=45, unit="degree"), True, [
        "45°", "45 degrees", "π/4 rad", "0.7854 rad", r"\pi/4 \text{ rad}", r"\frac{\pi}{4} radians", r"45^\circ",
        "45 deg", r"$45^{\circ}$", r"\theta = 45^\circ",
    ]),
    (dict(answer=0.785398, unit="rad"), True, [
        "π/4", "π/4 rad", "45°", "0.785 rad", r"\pi/4", r"\frac{\pi}{4}\ \text{rad}", "0.7854 radians",
    ]),
    (dict(answer=1.0, unit="atm"), True, [
        "1 atm", "101325 Pa", "101.325 kPa", "760 mmHg", "760 torr", "14.7 psi", "1.013 bar", "1013.25 hPa",
        "1.013 × 10^5 Pa",
    ]),
    (dict(answer=2, unit="hour"), True, [
        "2 h", "120 min", "7200 s", "2 hours", "2 hrs", "120 minutes", "2 hr.", "2 Hours",
    ]),
    (dict(answer=0.001, unit="mol/L"), True, [
        "1 mM", "1e-3 M", "1 mmol/L", "0.001 mol/L", "1 mol/m^3", "10^-3 M", "1 × 10^{-3} M", "1 millimolar",
        r"1\,\text{mM}",
    ]),
    (dict(answer=72, unit="1/min"), True, [
        "72 per minute", "72 /min", "1.2 Hz", "72 min^-1", "72",
    ]),
    (dict(answer=1.6e-19, unit="C"), True, [
        "1.6e-19 C", "1.6 × 10⁻¹⁹ coulombs", "1 e",
    ]),
    (dict(answer=13.6, unit="eV"), True, [
        "13.6 eV", "2.18e-18 J", "13.6 electron-volts", "1 Ry",
    ]),
    (dict(answer=0.511, unit="MeV"), True, [
        "0.511 MeV", "511 keV", "511000 eV",
    ]),
    (dict(answer=931.5, unit="MeV"), True, [
        "931.5 MeV",
    ]),
    (dict(answer=20, unit="°C", relative_tolerance=0.005), True, [
        "20 °C", "293.15 K", "68 °F",
    ]),
    (dict(answer=10, unit="kN"), True, [
        "10 kN", "10,000 N", "10000 N", "10 kilonewtons", "10 kiloNewtons", "1e4 N",
    ]),
    (dict(answer=5, unit="µF"), True, [
        "5 µF", "5 uF", "5 microfarads", r"5 \mu F", r"5\ \mu\text{F}", "5e-6 F", r"5 \mu\mathrm{F}",
        "5 microFarads", "5 μF",
    ]),
    (dict(answer=30, unit="mL"), True, [
        "30 mL", "30 ml", "30 cc", "0.03 L", "30 milliliters", "30 cm^3", "30 cm³",
    ]),
    (dict(answer=2.7, unit="g/cm^3"), True, [
        "2.7 g/cm³", "2700 kg/m^3", "2.7 g/mL", "2.7 g/cc", "2.7 g cm^-3", "2.7 grams per cubic centimeter",
        "2.7 kg/L", r"2.7\,\text{g/cm}^3", r"2.7 \mathrm{g/cm^3}",
    ]),
    (dict(answer=100, unit="W"), True, [
        "100 W", "100 watts", "100 Watts", "100 J/s", "0.1 kW", "100 V·A",
    ]),
    (dict(answer=50, unit="dB"), True, [
        "50 dB", "50 decibels",
    ]),
    (dict(answer=3, unit=""), True, [
        "3", "3.0", "3.00", "n = 3", "x=3", "3 electrons", r"\boxed{3}", "The answer is 3.", "$3$", "3.",
    ]),
    (dict(answer=1.989e+30, unit="kg"), True, [
        "1.989 × 10^30 kg", "1.989e30 kg", r"1.989\times 10^{30}\ \text{kg}", "1.989e33 g",
    ]),
    (dict(answer=5, unit="parsec"), True, [
        "5 pc", "5 parsecs", "5 parsec", "16.3 ly",
    ]),
    (dict(answer=1, unit="N/m"), True, [
        "1 N/m", "1 N m^-1", "1 kg/s^2", "1 J/m^2", "1 newton per meter",
    ]),
    (dict(answer=1, unit="T"), True, [
        "1 T", "10000 G", "1 Wb/m²", "1 V s/m^2", "1 N/(A m)", "10^4 gauss", "1 kg/(A s^2)",
    ]),
    (dict(answer=8.85e-12, unit="F/m"), True, [
        "8.85e-12 F/m", "8.85 × 10^-12 C²/(N·m²)", "8.85e-12 C^2/N/m^2", r"8.85\times10^{-12}\,\mathrm{F\,m^{-1}}",
        "8.85e-12 C^2 N^-1 m^-2", "8.85e-12 C^2/(N m^2)",
    ]),
]
"""Answers, right or wrong."""
UNITS = {
    "J": [
        "J", "Joules", "joule", "JOULES", "Joule", "N m", "N·m", "N*m", "Nm", "N-m", "newton-meters",
        "newton meters", "Newton metres", "W s", "kg m^2/s^2", "kg·m²·s⁻²", "W·s", "V·C", "Pa m^3", r"\text{J}",
        r"\mathrm{N\cdot m}", r"\text{N}\cdot\text{m}", r"\rm J",
    ],
    "kJ/mol": [
        "kJ/mol", "kJ mol^-1", "kJ·mol⁻¹", "kJ mol-1", "kilojoules per mole", "kJ per mol", "kJ/mole", "KJ/mol",
        "kj/mol", r"\text{kJ mol}^{-1}", r"\text{kJ/mol}", r"\mathrm{kJ\,mol^{-1}}", "kilojoule/mol", "J/mmol",
    ],
    "J/(mol K)": [
        "J/(mol K)", "J/(mol·K)", "J/(mol*K)", "J/mol/K", "J/mol·K", "J/mol-K", "J/mol K", "J mol^-1 K^-1",
        "J mol⁻¹ K⁻¹", "J·K⁻¹·mol⁻¹", r"\text{J mol}^{-1}\text{K}^{-1}", r"\mathrm{J\,mol^{-1}\,K^{-1}}",
        "joules per mole per kelvin", "joules per mole kelvin", "J/K/mol", "J/(K mol)", r"\frac{J}{mol\cdot K}",
        "J/(mol °C)",
    ],
    "V": [
        "V", "Volts", "volts", "volt", "J/C", "W/A", r"\text{V}", "VOLTS",
    ],
    "ohm": [
        "ohm", "Ω", "Ohms", "ohms", r"\Omega", "V/A", r"\text{ ohms}", "OHMS", "Ohm",
    ],
    "kg": [
        "kg", "Kg", "KG", "kilograms", "kilogram", "Kilograms", "kgs", r"\mathrm{kg}", r"\text{kg}",
    ],
    "µm": [
        "µm", "μm", "um", r"\mu m", r"\mu\mathrm{m}", r"\mu\text{m}", r"\mathrm{\mu m}", "micrometers", "microns",
        "micrometre", "micron", r"\text{µm}", r"\text{$\mu$m}", r"\,\mu\mathrm{m}", r"\si{\micro\metre}",
        r"\micro\metre",
    ],
    "Å": [
        "Å", "Angstrom", "angstroms", "Angstroms", "angstrom", r"\text{\AA}", r"\AA", r"\mathrm{\AA}", "ångström",
        "Ångström", r"\mathring{A}", r"\text{Å}",
    ],
    "m^2": [
        "m^2", "m²", "m2", "square meters", "square metres", "sq. m", "sq m", "meters squared", "m**2",
        r"\text{m}^2", r"\mathrm{m^2}", "square meter", "metres^2",
    ],
    "cm^3": [
        "cm^3", "cm³", "cc", "mL", "ml", "cubic centimeters", "cubic centimetres", "milliliters", "cubic cm",
        "cu cm",
    ],
    "eV": [
        "eV", "electron volts", "electron-volts", "electronvolts", "electron volt", r"\text{eV}", "ev",
        "Electron volts",
    ],
    "ly": [
        "ly", "light years", "light-years", "light year", "lightyears", "light_year",
    ],
    "kWh": [
        "kWh", "kW h", "kW-h", "kW·h", "kilowatt-hours", "kilowatt hours", "KWh", "kW hr",
    ],
    "s^-1": [
        "s^-1", "1/s", "/s", "s⁻¹", "per second", "Hz", "sec^-1", r"\text{s}^{-1}", r"\mathrm{s^{-1}}",
        "inverse seconds", "reciprocal seconds", "hertz",
    ],
    "rpm": [
        "rpm", "rev/min", "revolutions per minute", "RPM", "revs per minute", "rev per minute",
    ],
    "mol/L": [
        "mol/L", "M", "molar", "mol L^-1", "moles per liter", "mol dm^-3", "mol/dm³", "moles/liter", "mol·L⁻¹",
        r"\text{mol/L}", r"\text{M}", "mol/l",
    ],
    "Pa": [
        "Pa", "Pascals", "pascal", "N/m^2", "N/m²", "N m^-2", "newtons per square meter", "pascals",
    ],
    "W/(m K)": [
        "W/(m K)", "W/m/K", "W/m K", "W/m·K", "W m^-1 K^-1", "watts per meter kelvin", "W/(m·K)", "W/mK",
    ],
    "ppb": [
        "ppb", "PPB", "parts per billion",
    ],
    "rev/min": [
        "rev/min", "rpm",
    ],
    "T": [
        "T", "tesla", "teslas", "Tesla", "Wb/m^2",
    ],
    "min": [
        "min", "minutes", "mins", "minute", "Minutes", "min.",
    ],
    "h": [
        "h", "hr", "hrs", "hours", "hour", "Hours",
    ],
    "degree": [
        "degree", "degrees", "°", r"^\circ", r"^{\circ}", "deg", "Degrees", r"\degree", " degrees",
    ],
    "g/mol": [
        "g/mol", "g mol^-1", "grams per mole", "g/mole", "gram/mol", "g·mol⁻¹",
    ],
    "N": [
        "N", "Newtons", "newton", "Newton", "kg m/s^2", "kg·m/s²",
    ],
    "mmHg": [
        "mmHg", "mm Hg", "torr", "Torr",
    ],
    "atm": [
        "atm", "atmospheres", "ATM", "atmosphere",
    ],
    "cm^-1": [
        "cm^-1", "cm⁻¹", "1/cm", r"\text{cm}^{-1}", r"\mathrm{cm^{-1}}", "inverse centimeters", "cm**-1", "/cm",
        "per cm",
    ],
    "mi/h": [
        "mph", "mi/h", "miles per hour", "miles/hour", "mi/hr",
    ],
    "%": [
        "%", "percent", r"\%", "pct", "Percent", "per cent",
    ],
    "C": [
        "C", "coulombs", "Coulombs", "A s", "A·s",
    ],
    "F": [
        "F", "farads", "Farad",
    ],
    "dB": [
        "dB", "decibels", "decibel",
    ],
    "AU": [
        "AU", "au", "astronomical units",
    ],
    "Bq": [
        "Bq", "becquerel", "decays/s", "decays per second", "s^-1",
    ],
    "nV/Hz^0.5": [
        "nV/√Hz", r"nV/\sqrt{Hz}", "nV Hz^-0.5", "nV/Hz^(1/2)", r"\text{nV}/\sqrt{\text{Hz}}",
    ],
    "ft lbf": [
        "ft·lbf", "ft-lb", "foot-pounds", "ft lb", "ft-lbs", "foot pounds", "ft·lb",
    ],
    "psi": [
        "psi", "PSI", "pounds per square inch", "lb/in^2", "lbf/in^2",
    ],
}
"""Spellings of one unit."""

TEXTS = [
    ("C#", "C", False), ("Vitamin A", "vitamin", False), ("Class A", "class", False), ("p<0.05", "p>0.05", False),
    ("n!", "n", False), ("a*b", "a/b", False), ("50%", "50", False), ("5'", "5''", False), ("a<b", "a>b", False),
    ("1,000", "1000", True), ("U.S.", "US", True), ("São Paulo", "Sao Paulo", True), ("Ångström", "Angstrom", True),
    ("AT&T", "AT and T", True), ("β-carotene", "beta-carotene", True), ("C++", "C", False), ("Ca2+", "Ca", False),
    ("-5", "5", False), ("A", "B", False), ("A", "a", True), ("The Beatles", "Beatles", True), ("O2", "O₂", True),
    ("H2O", "H_2O", True), ("Ca2+", "Ca^{2+}", True), ("sp3", "sp^3", True), ("5%", "5", False),
    ("103", "10³", False), ("10^3", "10³", True), ("10^{23}", "10^23", True),
    ("mitochondria", "The mitochondria.", True), ("mitochondria", "the answer is Mitochondria", True),
    ("H2O", "H₂O", True), ("β", "beta carotene", False), ("Beta Carotene", "beta-carotene", True),
    ("5", "-5", False), ("15", "1.5", False), ("12", "1/2", False), ("Cl", "Cl-", False), ("Cl-", "Cl⁻", True),
    ("Cl-", r"\text{Cl}^-", True), ("a", "the", False), ("mitochondria", r"\boxed{\text{mitochondria}}", True),
    ("Paris", "Paris or London", False), ("Paris", "The answer is Paris. Or London.", False),
    ("Paris", "The answer is Paris. It is the capital of France.", True),
    ("Newton's second law", "Newtons second law", True), ("Newton's second law", "Newton’s second law", True),
    ("iron(III) oxide", "iron (III) oxide", True), ("copper(I)", "copper (I)", True), ("f(x)", "f x", False),
    ("[0,1)", "(0,1]", False), ("x_2", "x^2", False), ("x_2", "x2", True), ("x^2", "x²", True), ("2^3", "23", False),
    ("e^x", "ex", False), ("1s2 2s2 2p6", "1s^2 2s^2 2p^6", True), ("1s2 2s2 2p6", "1s² 2s² 2p⁶", True),
    ("14C", "^{14}C", True), ("14C", "¹⁴C", True), ("a-b", "a b", False), ("a-b", "a - b", True),
    ("a - b", "a + b", False), ("COVID-19", "COVID 19", True), ("X-ray", "X ray", True), ("3-4", "3 4", False),
    ("10:30", "1030", False), ("½", "1/2", True), ("1½", "1 1/2", True), ("1½", "11/2", False),
    ("p < 0.05", "p<0.05", True), (r"p \leq 0.05", "p ≤ 0.05", True), ("p<0.05", "p≤0.05", False),
    ("A ∪ B", "A ∩ B", False), ("A ∪ B", r"A \cup B", True), ("a≠b", "a=b", False), ("A minor", "minor", False),
    ("the cell", "cell", True), ("A cell", "cell", True), ("Ph.D.", "PhD", True), ("St. Louis", "St Louis", True),
    ("red, green", "red green", True), ("1, 2, ...", "1, 2", False), ("1,2", "12", False), ("1, 2", "1,2", True),
    ("Hello!", "hello", True), ("5!", "5", False), ("$5", "5", False), (r"\frac{1}{2}", "1/2", True),
    ("Schrödinger equation", "Schrodinger equation", True), ("x̄", "x", False), ("Å", "A", False),
    ("naïve", "naive", True), ("true", "not true", False), ("α", "alpha", True), ("10 μm", "10 µm", True),
    ("°C", "C", False), ("f'(x)", "f(x)", False), ("f'(x)", "f''(x)", False), ("3'", "3", False), ("~p", "p", False),
    ("¬p", "p", False), ("p∧q", "p∨q", False), ("#1", "1", False), ("@home", "home", False), ("$x$", "x", True),
    ("**Paris**", "Paris", True), ("`ls -l`", "ls -l", True), ("ls -l", "ls l", False), ("--help", "help", False),
    ("__init__", "init", False), ("snake_case", "snakecase", False), ("C", "C#", False), ("F#", "F", False),
    ("i++", "i", False), ("O(n log n)", "O(n)", False), ("O(n^2)", "O(n²)", True), ("O(n^2)", "O(n^{2})", True),
    ("2n", "2^n", False), ("n^2", "2n", False), ("0.5", "0,5", False), ("€5", "5", False), ("5€", "5", False),
    ("Na+", "Na", False), ("NaCl", "Na Cl", False), ("CO₂", "CO2", True), ("SO4^2-", "SO_4^{2-}", True),
    ("SO4^2-", "SO4²⁻", True), ("", "x", False), ("?!", "?!", True), ("7", "7.", True), ("left", "right", False),
    ("Jan. 5, 2020", "Jan 5 2020", True), ("New York City", "New York", False),
    ("DNA polymerase III", "DNA polymerase", False), ("type I", "type II", False), ("E. coli", "E coli", True),
    ("2,4-dinitrophenol", "2,4 dinitrophenol", True), ("2,4-dinitrophenol", "2-dinitrophenol", False),
    ("(R)-lactic acid", "(S)-lactic acid", False), ("R-lactic acid", "lactic acid", False), ("+1", "1", False),
    ("+", "-", False), ("*", "+", False), ("photosynthesis", "Photosynthesis.", True),
    ("photosynthesis", "photo synthesis", False), ("photosynthesis", "It is photosynthesis", False),
    ("photosynthesis", "The answer is: photosynthesis", True),
    ("photosynthesis", "**Answer:** photosynthesis", True), ("photosynthesis", "Answer: **Photosynthesis**", True),
    ("photosynthesis", "photosynthesis, because plants use light", True),
    ("photosynthesis", "photosynthesis or respiration", False), ("photosynthesis", "not photosynthesis", False),
    ("photosynthesis", "photosynthesis; respiration", False),
    ("photosynthesis", "respiration and photosynthesis", False), ("Albert Einstein", "Einstein", False),
    ("Albert Einstein", "albert einstein", True), ("Albert Einstein", "A. Einstein", False),
    ("carbon dioxide", "Carbon-dioxide", True), ("carbon dioxide", "CO2", False), ("Na+", "Na^{+}", True),
    ("Na+", "Na-", False), ("NH4+", "NH_4^+", True), ("NH4+", "NH₄⁺", True), ("SO4 2-", "SO4^{2-}", False),
    ("Fe3+", "Fe^{3+}", True), ("Fe3+", "Fe^{2+}", False), ("Fe3+", "Fe3", False), ("E = mc^2", "E=mc²", True),
    ("E = mc^2", "E=mc^3", False), ("E=mc^2", "E=mc2", True), ("H-O-H", "HOH", False), ("x > 5", "x ≥ 5", False),
    ("x > 5", "x<5", False), ("x > 5", "5 < x", False), ("100 %", "100%", True), ("100%", "100", False),
    ("$5", "$5", True), ("$5", r"\$5", True), ("3/4", "3/4", True), ("3/4", "34", False), ("3.14", "314", False),
    ("1.0", "10", False), ("-1", "1", False), ("−1", "-1", True), ("+1", "-1", False), ("A+", "A", False),
    ("A+", "A-", False), ("AB+", "AB", False), ("O-", "O", False), ("B12", "B 12", False),
    ("C6H12O6", "C_6H_{12}O_6", True), ("C6H12O6", "C₆H₁₂O₆", True), ("C6H12O6", r"\ce{C6H12O6}", True),
    ("C6H12O6", r"\mathrm{C_6H_{12}O_6}", True), ("π", "pi", True), ("π", r"\pi", True), ("true", "True", True),
    ("true", "false", False), ("yes", "Yes.", True), ("yes", "no", False), ("no", "No, it is not", False),
    ("Li", "lithium", False), ("covalent bond", "a covalent bond", True),
    ("covalent bond", "the covalent bond.", True), ("covalent bond", "covalent bonds", False),
    ("the sun", "sun", True), ("The Who", "Who", True), ("a", "b", False), ("", "a", False), ("don't", "dont", True),
    ("don't", "do not", False), ("5'-ATG-3'", "5'-ATG-3'", True), ("5'-ATG-3'", "3'-ATG-5'", False),
    ("f''", "f'", False), ("f'", "f", False), ("x^2", "x^3", False), ("x^2", "x2", True), ("2^x", "2x", False),
    ("a_1", "a_2", False), ("a_{12}", "a_12", True), ("a,b", "ab", False), ("a,b", "b,a", False),
    ("(1,2)", "(2,1)", False), ("(1, 2)", "(1,2)", True), ("[1,2]", "(1,2)", False), ("{1,2}", r"\{1,2\}", True),
    ("{1,2}", "(1,2)", False), ("A∪B", "A∩B", False), ("p→q", "q→p", False), ("p → q", r"p \to q", True),
    ("p ∧ q", r"p \land q", True), ("p ∧ q", "p ∨ q", False), ("√2", "2", False), ("√2", r"\sqrt{2}", True),
    ("∞", "infinity", False), ("∞", r"\infty", True), ("#FF0000", "FF0000", False), ("@", "#", False),
    ("~", "", False), ("192.168.0.1", "19216801", False), ("192.168.0.1", "192.168.0.1", True),
    ("v1.2", "v12", False), ("e.g.", "eg", True), ("U.S.A.", "USA", True), ("U.K.", "UK", True),
    ("Dr. Smith", "Dr Smith", True), ("12:30 p.m.", "12:30 pm", True), ("12:30", "1230", False),
    ("1,000,000", "1000000", True), ("1,000", "1.000", False), ("10,5", "105", False), ("1 000", "1000", False),
    ("2.50", "2.5", False), ("½", "0.5", False), ("café", "cafe", True), ("Müller", "Muller", True),
    ("Müller", "Mueller", False), ("é", "e", False), ("ñ", "n", False), ("Gödel", "Godel", True),
    ("Erdős", "Erdos", True), ("Łódź", "Lodz", True), ("Ørsted", "Orsted", True), ("東京", "東京", True),
    ("東京", "京都", False), ("が", "か", False), ("й", "и", False), ("Москва", "москва", True),
    ("γ-ray", "gamma ray", True), ("γ-ray", "gamma-ray", True), ("α-helix", "alpha helix", True),
    ("β-sheet", "alpha sheet", False), ("μ", "mu", True), ("Ω", "ohm", False), ("sp3d2", "sp^3d^2", True),
    ("dsp2", "dsp^2", True), ("C-14", "C14", False), ("C-14", "C-14", True), ("carbon-14", "carbon 14", True),
    ("10^-3", "10^3", False), ("10^-3", "10^{-3}", True), ("10^-3", "10⁻³", True), ("10^-3", "10-3", False),
    ("m/s", "m·s", False), ("m/s^2", "m/s²", True), ("kg·m/s", "kg*m/s", False), ("a·b", r"a\cdot b", True),
    ("a×b", "a·b", False), ("3×4", "3*4", True), ("p|q", "pq", False), ("&", "and", True), ("R&D", "R and D", True),
    ("C/C++", "C++", False), (".NET", "NET", False), ("node.js", "nodejs", True), ("i.e.", "ie", True),
    ("~/bin", "bin", False), ("a.out", "aout", True), ("*", "", False), ("**kwargs", "kwargs", False),
    ("x*", "x", False), ("Q*", "Q", False), ("Q*", r"\(Q^*\)", True), ("n'", "n", False), ("H0", "H_0", True),
    ("H₀", "H0", True), ("H0", "H1", False), ("T_c", "Tc", True),
]
"""A gold answer, an answer, and whether it is right."""
# fmt: on
