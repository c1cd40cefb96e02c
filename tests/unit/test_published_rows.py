"""Rows in the published form of each set, with content of our own: what they are read as, or why they are refused."""

# ruff: noqa: E501 - a row of a table is a line
from __future__ import annotations

import gzip
import json

import pytest

from prorl_trio.tasks.sets import load_task_set, open_task_set
from prorl_trio.tasks.sets.forms import FORMS
from prorl_trio.types.errors import ConfigError

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+3?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"index": 0, "split": "train", "question": "2+3?", "answer": "2+3=5\n#### 5"},
}
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x):\n    """Double x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n",
}
MBPP = {
    "task_id": 2,
    "text": "Write a function to double a number.",
    "code": "def double(x):\r\n  return 2 * x",
    "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
BIGCODEBENCH = {
    "task_id": "BigCodeBench/0",
    "complete_prompt": "def task_func(x):\n",
    "instruct_prompt": "Double a number. You should write self-contained code starting with: def task_func(x):",
    "canonical_solution": "    return 2 * x",
    "code_prompt": "def task_func(x):\n",
    "test": "import unittest\nclass TestCases(unittest.TestCase):\n    def test_case_1(self):\n"
    "        self.assertEqual(task_func(2), 4)\n",
    "entry_point": "task_func",
    "doc_struct": "{}",
    "libs": "['math']",
}
APPS = {
    "problem_id": 1,
    "question": "Add the two numbers.",
    "solutions": '["print(sum(map(int, input().split())))"]',
    "input_output": '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}',
    "difficulty": "interview",
    "url": "https://example.org/1",
    "starter_code": "",
}
LIVECODEBENCH = {
    "question_title": "Double",
    "question_content": "Print the double.",
    "platform": "atcoder",
    "question_id": "abc_a",
    "contest_id": "abc",
    "contest_date": "2025-01-01T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": '[{"input": "2", "output": "4", "testtype": "stdin"}]',
    "private_test_cases": '[{"input": "3", "output": "6", "testtype": "stdin"}]',
    "metadata": "{}",
}
GPQA = {
    "Question": "Which is even?",
    "Correct Answer": "two",
    "Incorrect Answer 1": "one",
    "Incorrect Answer 2": "three",
    "Incorrect Answer 3": "five",
    "Explanation": "It can be halved.",
    "Record ID": "rec1",
    "High-level domain": "Physics",
    "Subdomain": "Optics",
    "Canary String": "canary",
    "Question Writer": "somebody",
}

MATHS = [
    ("GSM8K", {"question": "2+3?", "answer": "2+3 = <<2+3=5>>5\n#### 5"}, "5"),
    ("GSM8K, grouped digits", {"question": "?", "answer": "so it is\n#### 1,200"}, "1200"),
    ("MATH", {"problem": "?", "level": "Level 3", "type": "Algebra", "solution": "so $\\boxed{\\frac{1}{2}}$."}, "\\frac{1}{2}"),
    ("MATH, two boxes", {"problem": "?", "solution": "$\\boxed{1}$ no: $\\boxed{{2}_{3}}$."}, "{2}_{3}"),
    ("MATH, without braces", {"problem": "?", "solution": "so $\\boxed 7$."}, "7"),
    ("MATH-500", {"problem": "?", "solution": "long", "answer": "p - q", "subject": "Algebra", "level": 2, "unique_id": "t/1.json"}, "p - q"),
    ("NuminaMath-CoT", {"source": "cn_k12", "problem": "2+3?", "solution": "It is $\\boxed{5}$.", "messages": [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "It is $\\boxed{5}$."}]}, "5"),
    ("NuminaMath-1.5", {"problem": "?", "solution": "s", "answer": "5", "problem_type": "Algebra", "question_type": "math-word-problem", "source": "olympiads", "synthetic": False, "problem_is_valid": "Yes", "solution_is_valid": "Yes"}, "5"),
    ("OpenR1-Math", {"problem": "?", "solution": "s", "answer": "5", "uuid": "u", "is_reasoning_complete": [True], "generations": ["a"], "correctness_count": 1, "messages": []}, "5"),
    ("OpenR1-Math, verified", {"problem": "?", "solution": "s", "answer": "5", "uuid": "u", "is_reasoning_complete": [True, False], "generations": ["a", "b"], "correctness_math_verify": [True, False], "correctness_llama": None, "finish_reasons": ["stop", "length"], "correctness_count": 1}, "5"),
    ("two boxes that are one answer", {"problem": "?", "solution": "so \\boxed{5} and \\boxed{6}"}, "5, 6"),
    ("a list of one, printed", {"problem": "?", "answer": "['2']"}, "2"),
    ("tabs, page breaks and line ends", {"problem": "?", "answer": "\\frac{1}{2}", "passages": None, "solution": "\frac"}, "\\frac{1}{2}"),
    ("figures about the row", {"problem": "?", "answer": "5", "llama8b_solve_rate": 0.5, "pass_at_n": 0.5, "iters": 3, "token_count": 9}, "5"),
    ("AIME, capital keys", {"ID": "2024-I-1", "Problem": "?", "Solution": "s", "Answer": 204}, "204"),
    ("AIME 1983-2024", {"ID": "1983-1", "Year": 1983, "Problem Number": 1, "Question": "?", "Answer": "60", "Part": None}, "60"),
    ("AIME 2025", {"problem": "?", "answer": "70", "id": "0"}, "70"),
    ("AMC", {"id": 0, "problem": "?", "answer": 142.0, "url": "https://example.org"}, "142"),
    ("DeepScaleR", {"problem": "?", "answer": "\\frac{1}{2}", "solution": "s"}, "\\frac{1}{2}"),
    ("DeepMath", {"question": "?", "final_answer": "0", "difficulty": 4.5, "topic": "Calculus", "r1_solution_1": "s"}, "0"),
    ("OlympiadBench", {"id": 1, "question": "?", "solution": ["s"], "final_answer": ["$2$"], "context": None, "modality_type": "Text-only", "subfield": "Algebra", "unit": None, "error": None}, "$2$"),
    ("MGSM", {"question": "?", "answer": None, "answer_number": 18, "equation_solution": None}, "18"),
    ("a matrix over several lines", {"problem": "?", "answer": "\\begin{pmatrix}\n1\n\\end{pmatrix}"}, "\\begin{pmatrix}\n1\n\\end{pmatrix}"),
    ("without a picture", {"problem": "?", "answer": "5", "has_image": False, "image": None}, "5"),
    ("verl: GSM8K", VERL, "5"),
    ("verl: MATH", {**VERL, "data_source": "DigitalLearningGmbH/MATH-lighteval", "extra_info": {"split": "train", "index": 0}}, "5"),
    ("verl: DAPO-Math-17k", {**VERL, "data_source": "math_dapo", "ability": "MATH", "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b"}}, "34"),
    ("DAPO-Math-17k-Processed", {**VERL, "prompt": "2+3?", "solution": "5", "source_prompt": VERL["prompt"]}, "5"),
    ("verl: no ability", {**VERL, "ability": None}, "5"),
    ("verl: ability stem", {**VERL, "ability": "stem"}, "5"),
    ("verl: number as truth", {**VERL, "reward_model": {"style": "rule", "ground_truth": 5}}, "5"),
    ("Skywork-OR1", {**VERL, "reward_model": {"style": "rule", "ground_truth": '["5"]'}}, "5"),
    ("verl: an interval as truth", {**VERL, "reward_model": {"style": "rule", "ground_truth": "[1, 2]"}}, "[1, 2]"),
    ("verl: nulls of Parquet", {**VERL, "images": [], "extra_info": {"tools_kwargs": {"x": None}, "index": 1}}, "5"),
]  # fmt: skip

CHOICES = [
    ("MMLU", {"question": "?", "subject": "algebra", "choices": ["0", "4", "2", "6"], "answer": 1}, "B", ["0", "4", "2", "6"]),
    ("MMMLU", {"Unnamed: 0": 0, "Question": "?", "A": "w", "B": "x", "C": "y", "D": "z", "Answer": "C", "Subject": "s"}, "C", ["w", "x", "y", "z"]),
    ("MMLU of lm-evaluation-harness", {"input": "?", "A": "w", "B": "x", "C": "y", "D": "z", "target": "D"}, "D", ["w", "x", "y", "z"]),
    ("MMLU-Pro", {"question_id": 70, "question": "?", "options": ["x", "y", "z"], "answer": "C", "answer_index": 2, "cot_content": "", "category": "law", "src": "s"}, "C", ["x", "y", "z"]),
    ("MMLU-Redux", {"question": "?", "choices": ["x", "y"], "answer": 0, "error_type": "ok", "source": None, "correct_answer": None, "potential_reason": None}, "A", ["x", "y"]),
    ("SuperGPQA", {"uuid": "u", "question": "?", "options": ["x", "y"], "answer": "y", "answer_letter": "B", "discipline": "d", "field": "f", "subfield": "s", "difficulty": "easy", "is_calculation": False}, "B", ["x", "y"]),
    ("ARC", {"id": "A1", "question": "?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}, "B", ["x", "y"]),
    ("ARC, labels of digits", {"id": "A1", "question": "?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "1"}, "A", ["x", "y"]),
    ("ARC's own file", {"id": "A1", "question": {"stem": "?", "choices": [{"text": "x", "label": "A"}, {"text": "y", "label": "B"}]}, "answerKey": "A"}, "A", ["x", "y"]),
    ("CommonsenseQA", {"id": "c", "question": "?", "question_concept": "q", "choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answerKey": "A"}, "A", ["x", "y"]),
    ("OpenBookQA", {"id": "7-980", "question_stem": "?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}, "B", ["x", "y"]),
    ("MedQA", {"question": "?", "answer": "y", "options": {"A": "x", "B": "y"}, "meta_info": "step1", "answer_idx": "B", "metamap_phrases": ["a"]}, "B", ["x", "y"]),
    ("MedQA of BigBIO", {"question": "?", "answer": "y", "answer_idx": "B", "meta_info": "", "options": [{"key": "A", "value": "x"}, {"key": "B", "value": "y"}]}, "B", ["x", "y"]),
    ("MedMCQA", {"id": "m", "question": "?", "opa": "w", "opb": "x", "opc": "y", "opd": "z", "cop": 2, "choice_type": "single", "exp": "e", "subject_name": "s", "topic_name": None}, "C", ["w", "x", "y", "z"]),
    ("C-Eval", {"id": 0, "question": "?", "A": "w", "B": "x", "C": "y", "D": "z", "answer": "A", "explanation": "e"}, "A", ["w", "x", "y", "z"]),
    ("AQuA-RAT", {"question": "?", "options": ["A)21", "B)21.5"], "rationale": "r", "correct": "B"}, "B", ["21", "21.5"]),
    ("a letter with its text", {"question": "?", "options": ["x", "y"], "answer": "B. y"}, "B", ["x", "y"]),
    ("a text in another case", {"question": "?", "options": ["Red", "Green"], "answer": "green."}, "B", ["Red", "Green"]),
    ("an index as text", {"question": "?", "options": "['x', 'y', 'z']", "answer": "1"}, "B", ["x", "y", "z"]),
    ("numbers in the options", {"question": "?", "options": ["1. x", "2. y", "3. z"], "answer": 2}, "B", ["x", "y", "z"]),
    ("small letters in the options", {"question": "?", "options": ["a) x", "b) y"], "answer": "b"}, "B", ["x", "y"]),
    ("ratios are no numbers of options", {"question": "?", "options": ["1:2", "2:1"], "answer": "B"}, "B", ["1:2", "2:1"]),
    ("decimals are no numbers of options", {"question": "?", "options": ["1.5", "2.5"], "answer": "B"}, "B", ["1.5", "2.5"]),
    ("an index of pandas", {"question": "?", "options": ["x", "y"], "answer": "B", "answer_index": 1.0}, "B", ["x", "y"]),
    ("nulls of Parquet", {"question": "?", "options": {"A": "x", "B": "y", "C": None}, "answer_idx": "B"}, "B", ["x", "y"]),
    ("answer as text", {"question": "?", "options": ["a thing", "b thing"], "answer": "b thing"}, "B", ["a thing", "b thing"]),
    ("letters in the options", {"question": "?", "options": ["(A) x", "(B) y"], "answer": "(B)"}, "B", ["x", "y"]),
    ("options stored as text", {"question": "?", "options": "['x', 'y']", "answer": "B"}, "B", ["x", "y"]),
]  # fmt: skip

CODE = [
    ("HumanEval", HUMANEVAL, "assert", "HumanEval/0"),
    ("HumanEval+", {**HUMANEVAL, "test": "import numpy\n" + HUMANEVAL["test"]}, "assert", "HumanEval/0"),
    ("MBPP", MBPP, "assert", "2"),
    ("MBPP, sanitized", {"source_file": "s", "task_id": 3, "prompt": "Double.", "code": MBPP["code"], "test_imports": ["import math"], "test_list": MBPP["test_list"]}, "assert", "3"),
    ("MBPP+", {"task_id": 4, "prompt": "Double.", "code": MBPP["code"], "source_file": "s", "test_imports": [], "test_list": MBPP["test_list"], "test": "for x in (1, 2):\n    assert double(x) == 2 * x"}, "assert", "4"),
    ("MBPP, a class of the solution", {**MBPP, "code": "class Pair:\n  def __init__(self, a, b): self.a = a\ndef f(p): return p.a", "test_list": ["assert f(Pair(1, 2)) == 1"]}, "unittest", "2"),
    ("MBPP, a class in the set-up", {**MBPP, "code": "class Node:\n  x = 1\ndef f(n): return n.x", "test_setup_code": "root = Node()", "test_list": ["assert f(root) == 1"]}, "unittest", "2"),
    ("BigCodeBench", BIGCODEBENCH, "unittest", "BigCodeBench/0"),
    ("APPS", APPS, "output", "1"),
    ("APPS, calls", {**APPS, "starter_code": "class Solution:\n    def add(self, a, b):\n", "input_output": CALLS}, "function", "1"),
    ("TACO", {**APPS, "raw_tags": "[]", "name": "n", "source": "s", "tags": "[]", "skill_types": "[]", "Expected Auxiliary Space": None, "time_limit": "1 second", "date": None, "picture_num": "0", "memory_limit": "256", "Expected Time Complexity": None}, "output", "1"),
    ("LiveCodeBench", LIVECODEBENCH, "output", "abc_a"),
    ("Eurus-2, programs", {**VERL, "ability": "code", "reward_model": {"style": "rule", "ground_truth": APPS["input_output"]}}, "output", "rows-1"),
    ("Eurus-2, calls", {**VERL, "ability": "code", "reward_model": {"style": "rule", "ground_truth": CALLS}}, "function", "rows-1"),
]  # fmt: skip

SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
REFUSED = [
    ("MMLU-Pro, a letter of no option", {"question": "?", "options": ["x", "y", "z"], "answer": "I"}, "field `answer`: 'I' names none of the 3 choices"),
    ("an index beyond the options", {"question": "?", "choices": ["x", "y"], "answer": 2}, "'2' names none of the 2"),
    ("answers that disagree", {"question": "?", "options": ["x", "y"], "answer": "A", "answer_index": 1}, "field `answer`: 'A' names another choice than `answer_index`"),
    ("a letter and a text", {"question": "?", "options": ["B", "A"], "answer": "A"}, "names two choices"),
    ("a text that may be an index", {"question": "?", "choices": ["1", "42"], "answer": "1"}, "names two choices"),
    ("tests that assert nothing", {"task_id": "HumanEval/0", "prompt": "def f(x):\n    pass", "canonical_solution": "", "test": "def check(candidate):\n    pass\n", "entry_point": "f"}, "none asserts anything"),
    ("two choices alike", {"question": "?", "options": ["x", "x"], "answer": "x"}, "two alike"),
    ("no answer to choices", {"question": "?", "options": ["x", "y"]}, "field `answer`: there is none"),
    ("a hidden answer", {"id": "m", "question": "?", "opa": "w", "opb": "x", "opc": "y", "opd": "z", "cop": -1}, "field `cop`: '-1'"),
    ("one choice", {"question": "?", "options": ["x"], "answer": "A"}, "it has 1 choices"),
    ("an array as numpy prints it", {"question": "?", "options": "['x' 'y' 'z']", "answer": "A"}, "field `options`: it is a text"),
    ("labels alike", {"question": "?", "options": [{"label": "A", "text": "x"}, {"label": "A", "text": "y"}], "answer": "A"}, "two of its labels are alike"),
    ("a letter with another text", {"question": "?", "options": ["x", "y"], "answer": "B. x"}, "field `answer`: 'B. x' names none"),
    ("an index that may be a number", {"question": "?", "options": ["1 V", "5 V"], "answer": "1"}, "field `answer`: '1' names none"),
    ("several letters", {"question": "?", "options": ["x", "y", "z"], "answer": "A, B"}, "write the letter of the right one"),
    ("MMLU-Redux, a wrong question", {"question": "?", "choices": ["x", "y"], "answer": 0, "error_type": "no_correct_answer"}, "field `error_type`: it is 'no_correct_answer': the set itself marks the row"),
    ("NuminaMath-1.5, a wrong problem", {"problem": "?", "answer": "5", "problem_is_valid": "Incomplete", "solution_is_valid": "Yes"}, "field `problem_is_valid`: it is 'Incomplete'"),
    ("a row that is not valid", {"problem": "?", "answer": "5", "is_valid": False}, "field `is_valid`: it is False"),
    ("numbers that the question needs", {"question": "What is a + b?", "a": 3, "b": 4, "answer": 7}, "field `a`"),
    ("a tolerance", {"question": "?", "answer": 5, "tolerance": 0.1}, "field `tolerance`"),
    ("reasoning-gym", {"question": "?", "answer": "5", "metadata": {"source_dataset": "countdown"}}, "use --tasks reasoning-gym:countdown"),
    ("a missing question of pandas", {"question": "nan", "answer": "5"}, "field `question`: it says 'nan'"),
    ("an empty question, by its own name", {"question": "", "answer": "5"}, "field `question`: there is none"),
    ("an object, printed", {"question": "?", "answer": "{'value': 5}"}, "field `answer`: it is an object, printed"),
    ("a list, printed", {"question": "?", "answer": "['2', '3']"}, "several answers"),
    ("a lost backslash", {"question": "?", "answer": "\frac{1}{2}"}, "field `answer`: it has the control character `\\f` where `\\frac` was meant"),
    ("a lost backslash in a question", {"question": "What is 2\times 3?", "answer": "6"}, "field `payload.question`: it has the control character `\\t` where `\\times`"),
    ("a lost backslash in a choice", {"question": "?", "options": ["\\left(1\right)", "y"], "answer": "A"}, "field `payload.grader.choices[0]`: it has the control character `\\r` where `\\right`"),
    ("a lost backslash in a truth of verl", {**VERL, "reward_model": {"style": "rule", "ground_truth": "\beta"}}, "field `reward_model.ground_truth`: it has the control character `\\b` where `\\beta`"),
    ("a lost backslash in an instance", {"instance_id": "a", "handler": "math", "payload": {"question": "?", "answer": ["\nu_0"]}}, "field `payload.answer[0]`: it has the control character `\\n` where `\\nu`"),
    ("choices as a number", {"question": "?", "options": 4, "answer": "A"}, "field `options`: it is a number"),
    ("pictures", {"problem": "What is x?", "answer": "5", "images": [{"path": "a.png"}]}, "field `images`"),
    ("a picture in the text", {"problem": "<image> What is x?", "answer": "5"}, "which the policy cannot see"),
    ("geo3k of verl", {**VERL, "images": [{"bytes": None}]}, "field `images`"),
    ("a passage", {"context": "long passage", "question": "Where?", "answer": "Paris"}, "field `context`"),
    ("SVAMP", {"ID": "chal-1", "Body": "Each pack costs 76.", "Question": "How much?", "Equation": "( 76 - 25 )", "Answer": 51.0, "Type": "Subtraction"}, "field `Body`"),
    ("PubMedQA", {"pubid": 1, "question": "?", "context": {"contexts": ["c"]}, "long_answer": "l", "final_decision": "yes"}, "unknown"),
    ("HotpotQA", {"id": "x", "question": "Are both?", "answer": "yes", "type": "comparison", "supporting_facts": {"title": ["t"]}, "context": {"title": ["t"]}}, "field `supporting_facts`"),
    ("TriviaQA", {"question": "?", "answer": {"value": "v", "aliases": ["v"]}}, "field `answer`: it is an object"),
    ("NQ", {"question": "?", "answer": ["a", "b"]}, "several answers"),
    ("countdown", {**VERL, "reward_model": {"style": "rule", "ground_truth": {"target": 98, "numbers": [44, 19]}}}, "field `reward_model.ground_truth`: it is an object with 'target', 'numbers'"),
    ("a list as truth", {**VERL, "reward_model": {"style": "rule", "ground_truth": ["5", "7"]}}, "several answers"),
    ("Search-R1", {**VERL, "ability": "fact-reasoning", "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris"]}}}, "'target'"),
    ("a word as truth of code", {**VERL, "ability": "code", "reward_model": {"style": "rule", "ground_truth": "Paris"}}, "field `ability`: it is 'code': tests"),
    ("another ability", {**VERL, "ability": "alignment"}, "field `ability`: it is 'alignment'"),
    ("a reward model", {**VERL, "reward_model": {"style": "model", "ground_truth": "3"}}, "graded by a model"),
    ("earlier turns", {**VERL, "prompt": [*VERL["prompt"], {"role": "assistant", "content": "ok"}, *VERL["prompt"]]}, "field `prompt`: its turns are user, assistant, user"),
    ("tools of verl", {**VERL, "prompt": SYSTEM, "extra_info": {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "5"}}}}}, "field `extra_info.tools_kwargs`"),
    ("a dialogue of verl", {**VERL, "extra_info": {"interaction_kwargs": {"name": "gsm8k"}}}, "field `extra_info.interaction_kwargs`"),
    ("an empty answer", {"problem": "x", "answer": ""}, "field `answer`: there is none"),
    ("a blank truth", {**VERL, "reward_model": {"style": "rule", "ground_truth": " "}}, "it is empty"),
    ("true as answer", {"problem": "x", "answer": True}, "it is true or false"),
    ("a proof", {"problem": "Prove that", "answer": "We proceed by induction. Let $n$ be even."}, "it is prose"),
    ("NuminaMath, proof", {"problem": "Prove it", "answer": "proof", "source": "olympiads"}, "it says 'proof'"),
    ("NuminaMath, notfound", {"problem": "?", "answer": "notfound"}, "it says 'notfound'"),
    ("MATH without a box", {"problem": "?", "solution": "so it is 2."}, "field `solution`: it has no \\boxed{}"),
    ("two answers", {"problem": "?", "answer": "5", "expected_answer": "6"}, "field `expected_answer`: it differs from `answer`"),
    ("two questions", {"problem": "a", "question": "b", "answer": "5"}, "field `question`: it differs from `problem`"),
    ("keys alike", {"problem": "a", "Problem": "b", "answer": "5"}, "differs from `problem` in its spelling only"),
    ("messages with another question", {"problem": "a", "solution": "$\\boxed{1}$", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]}, "field `messages`"),
    ("HumanEval with a prompt in prose", {**HUMANEVAL, "prompt": "Write a function that doubles."}, "field `prompt`: it is not the beginning"),
    ("HumanEval without check", {**HUMANEVAL, "test": "assert double(2) == 4"}, "field `test`: it defines no function"),
    ("HumanEval of another language", {**HUMANEVAL, "declaration": "int f();", "test": "void check() {}"}, "field `declaration`"),
    ("raw HumanEval+", {key: value for key, value in HUMANEVAL.items() if key != "test"}, "nearest form is HumanEval, for which `test` is missing"),
    ("MBPP without its function", {**MBPP, "code": "x = 1"}, "field `code`: it defines no function that `test_list` calls"),
    ("MBPP without tests", {**MBPP, "test_list": []}, "field `test_list`"),
    ("BigCodeBench without tests", {**BIGCODEBENCH, "test": "x = 1"}, "there are no tests"),
    ("APPS without tests", {**APPS, "input_output": ""}, "field `input_output`"),
    ("APPS, uneven tests", {**APPS, "input_output": '{"inputs": ["1"], "outputs": []}'}, "do not fit together"),
    ("TACO with pictures", {**APPS, "picture_num": "2"}, "field `picture_num`"),
    ("LiveCodeBench without function", {**LIVECODEBENCH, "public_test_cases": '[{"input": "2", "output": "4", "testtype": "functional"}]', "private_test_cases": "[]"}, "field `metadata`: there is no 'func_name'"),
    ("LiveCodeBench with damaged tests", {**LIVECODEBENCH, "private_test_cases": "eJw"}, "its tests are stored neither as JSON"),
    ("a verl row whose reward_model is text", {**VERL, "reward_model": "5"}, "field `reward_model`: it is a text"),
    ("a HumanEval entry point that is no name", {**HUMANEVAL, "entry_point": "f()"}, "field `entry_point`"),
    ("GAIA", {"task_id": "t", "Question": "?", "Level": 1, "Final answer": "5", "file_name": "a.xlsx"}, "field `file_name`"),
    ("a picture by number", {"problem": "?", "answer": "5", "image_id": 7}, "field `image_id`"),
    ("a picture that is required", {"problem": "?", "answer": "5", "has_image": True}, "field `has_image`"),
    ("a picture of HTML", {"problem": "?<img src=a>", "answer": "5"}, "which the policy cannot see"),
    ("an instruction", {"instruction": "Answer in binary.", "question": "?", "answer": "5"}, "field `instruction`"),
    ("a system prompt", {"system": "Answer in binary.", "question": "?", "answer": "5"}, "field `system`"),
    ("turns before choices", {"messages": [{"role": "user", "content": "a"}], "question": "?", "options": ["x", "y"], "answer": "A"}, "field `messages`"),
    ("RACE", {"article": "a", "question": "?", "options": ["x", "y"], "answer": "A", "example_id": "e"}, "field `article`"),
    ("a heading in a solution", {"problem": "?", "answer": "#### Solution\nIt is 5"}, "it is prose"),
    ("a solution as answer", {"problem": "?", "answer": "a " * 2000}, "it is prose"),
    ("an endless integer", {"problem": "?", "answer": 10**4000}, "it is an integer of more than 10000 bits"),
    ("a dialogue", {"messages": [{"role": "user", "content": "hi"}]}, "its form is unknown; its fields are `messages`"),
    ("an instance without a handler", {"instance_id": "a", "payload": {}}, "the nearest form is a task instance, for which `handler` is missing"),
    ("SQuAD", {"id": "1", "title": "t", "context": "c", "question": "?", "answers": {"text": ["x"]}}, "the nearest form is GSM8K, MATH"),
    ("nothing", {}, "its form is unknown; its fields are none"),
    ("a field too many", {"instance_id": "a", "handler": "math", "payload": {}, "extra": 1}, "unknown field `extra`"),
    ("no payload", {"instance_id": "a", "handler": "math"}, "missing required field `payload`"),
    ("a payload of another handler", {"instance_id": "a", "handler": "math", "payload": {"question": "?"}}, "`answer`"),
    ("an empty question", {"instance_id": "a", "handler": "math", "payload": {"question": " ", "answer": "1"}}, "question is empty"),
    ("a wide integer", {"instance_id": "b", "handler": "code", "payload": {"prompt": "p", "tests": {"kind": "function", "function": "f", "cases": [{"args": [70], "result": 2**70}]}}}, "field `payload.tests.cases[0].result`: the integer 1180591620717411303424 needs more than 64 bits"),
]  # fmt: skip


def ids(table):
    return [case[0] for case in table]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load one row, without grading gold answers."""
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("prorl_trio.tasks.sets.task_checks._check_golds", lambda tasks: {})

    def load(row):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        (instance,) = load_task_set(str(path))
        return instance

    return load


@pytest.mark.parametrize(("name", "row", "gold"), MATHS, ids=ids(MATHS))
def test_a_row_of_mathematics_is_its_question_and_its_final_answer(load, name, row, gold):
    instance = load(row)
    question = row.get("problem", row.get("question", row.get("Problem", row.get("Question", "2+3?"))))
    assert (instance.handler, instance.payload) == ("math", {"question": question, "answer": gold})


@pytest.mark.parametrize(("name", "row", "letter", "choices"), CHOICES, ids=ids(CHOICES))
def test_a_row_with_choices_is_asked_with_all_of_them(load, name, row, letter, choices):
    instance = load(row)
    assert instance.handler == "stem"
    assert instance.payload["question"] == "?"
    assert instance.payload["grader"] == {"kind": "choice", "choices": choices, "answer": letter}


def test_rows_of_gpqa_are_shuffled_always_in_the_same_way(load):
    first, again = load(GPQA), load(GPQA)
    assert first == again
    grader = first.payload["grader"]
    assert sorted(grader["choices"]) == ["five", "one", "three", "two"]
    assert grader["choices"]["ABCD".index(grader["answer"])] == "two"
    assert (first.instance_id, first.family) == ("rec1", "Physics")
    places = {load({**GPQA, "Question": f"Which is even? {n}"}).payload["grader"]["answer"] for n in range(30)}
    assert places == set("ABCD")


@pytest.mark.parametrize(("name", "row", "kind", "instance_id"), CODE, ids=ids(CODE))
def test_a_row_of_code_has_its_tests(load, name, row, kind, instance_id):
    instance = load(row)
    assert (instance.handler, instance.payload["tests"]["kind"]) == ("code", kind)
    assert instance.instance_id == instance_id


def test_rows_of_mbpp_show_the_tests_which_alone_name_the_function(load):
    payload = load(MBPP).payload
    assert "assert double(2) == 4" in payload["prompt"]
    assert payload["tests"]["functions"] == ["double"]
    assert payload["tests"]["tests"] == MBPP["test_list"]


def test_tabs_line_ends_and_page_breaks_of_a_question_are_no_lost_backslashes(load):
    question = "x\ty\r\nthe page\f\fends \x02 here\tand\nnow:\r\n1\t2"
    assert load({"question": question, "answer": "3"}).payload["question"] == question


def test_a_system_prompt_is_kept(load):
    assert load({**VERL, "prompt": SYSTEM}).payload["system_prompt"] == "Be brief."
    code = {**VERL, "prompt": SYSTEM, "reward_model": {"ground_truth": APPS["input_output"]}}
    assert load(code).payload["system_prompt"] == "Be brief."


@pytest.mark.parametrize(("name", "row", "said"), REFUSED, ids=ids(REFUSED))
def test_a_row_of_which_something_would_be_lost_is_refused_with_its_field(load, name, row, said):
    with pytest.raises(ConfigError) as caught:
        load(row)
    message = str(caught.value)
    assert said in message
    assert "line 1" in message
    assert "'int' object" not in message
    assert "Expecting value" not in message


def test_unknown_rows_are_told_the_known_forms_once(load):
    with pytest.raises(ConfigError) as caught:
        load({"a": 1})
    assert all(str(caught.value).count(form.name) == 1 for form in FORMS)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (b'\xef\xbb\xbf{"problem": "?", "answer": "1"}\n', 1),
        (b'[{"problem": "?", "answer": "1"}, {"problem": "?", "answer": "2"}]', 2),
        (b'[\n  {"problem": "?", "answer": "1"},\n  {"problem": "?", "answer": "2"}\n]\n', 2),
        (b'{\n  "problem": "?",\n  "answer": "1"\n}\n', 1),
        (gzip.compress(b'{"problem": "?", "answer": "1"}\r\n\r\n{"problem": "?", "answer": "2"}', mtime=0), 2),
    ],
)
def test_a_bom_an_array_and_gzip_are_read(tmp_path, content, count):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert len(load_task_set(str(path), check=False)) == count


def test_csv_is_read_as_gpqa_is_published(tmp_path):
    path = tmp_path / "gpqa.csv"
    path.write_text(
        'Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"a, b?",1,2,3,4\n'
    )
    (instance,) = load_task_set(str(path), check=False)
    assert instance.payload["question"] == "a, b?"
    path.write_text(",problem,answer\n0,a,1\n1,b,2\n")
    assert [each.payload["question"] for each in load_task_set(str(path), check=False)] == ["a", "b"]
    path.write_text(",problem,answer\n0,a,1\nsee table,b,2\n")
    with pytest.raises(ConfigError, match="row 2: a column without a name holds 'see table'"):
        load_task_set(str(path), check=False)
    path.write_text("problem;answer\na;0,5\n")
    with pytest.raises(ConfigError, match="the first line, 'problem;answer', has no comma"):
        load_task_set(str(path))
    path.write_text("problem,problem,answer\na,b,1\n")
    with pytest.raises(ConfigError, match="the first line names a column twice"):
        load_task_set(str(path))
    path.write_text("problem,answer\na\n")
    with pytest.raises(ConfigError, match="row 1: it has fewer fields than the first line names"):
        load_task_set(str(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"problem": "?", "answer": NaN}', "line 1: `NaN` is no JSON number: write null, or a text"),
        (b'{"problem": "?", "answer": -Infinity}', "`-Infinity` is no JSON number"),
        (b'{"problem": "?", "answer": 1e999}', "it has a number that is too large"),
        (b"{'problem': '?'}", "line 1: it is not valid JSON (column 2)"),
        (b'{"problem": "?"\n{"problem": "?", "answer": "1"}', "line 1: it is not valid JSON (column 16)"),
        (b'["problem", "?"]', "line 1: it is a list, where one JSON object is needed"),
        (b'{"problem": "?", "answer": "1", "answer": "2"}', "line 1, field `answer`: it is there twice"),
        (b'[{"problem": "?", "answer": "1", "answer": "2"}]', "an object names `answer` twice"),
        (b'[{"problem": "?", "answer": "1"}, 1]', "row 2: it is a number, where one JSON object is needed"),
        (b'"text"', "line 1: it is a text, where one JSON object is needed"),
        (b"[" * 100_000, "line 1: it is nested too deeply"),
        ("{}".encode("utf-16"), "is UTF-16 or UTF-32 text; save it as UTF-8"),
        (b"\x1f\x8bno gzip", "the gzip archive is damaged"),
        (
            b'[\n{"problem": "?"},\n]',
            "is one JSON value over several lines, and it is not valid JSON (line 3, column 1)",
        ),
        (b"[]", "holds no task instance"),
        (b"question,answer\n?,1\n", "is neither JSONL, JSON nor Parquet; it begins with 'question,answer'. A CSV file"),
        (b"PK\x03\x04 a workbook", "is neither JSONL, JSON nor Parquet"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:a\n", "is a pointer of Git LFS"),
    ],
)
def test_what_is_no_row_is_told_in_one_sentence(tmp_path, content, said):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_task_set(str(path))
    assert said in str(caught.value)


def test_parquet_names_its_package_or_is_read(tmp_path):
    path = tmp_path / "rows.parquet"
    try:
        from pyarrow import Table, parquet
    except ModuleNotFoundError:
        path.write_bytes(b"PAR1")
        with pytest.raises(ConfigError, match=r"prorl-trio\[parquet\].*read_parquet"):
            load_task_set(str(path))
        return
    parquet.write_table(Table.from_pylist([VERL, VERL]), path)
    assert [each.payload["answer"] for each in load_task_set(str(path), check=False)] == ["5", "5"]


def test_bad_rows_can_be_left_out_counted_and_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"problem": "?", "answer": str(n)} if n % 3 else {"problem": "?", "answer": ""} for n in range(21)]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError) as caught:
        load_task_set(str(path))
    told = str(caught.value).splitlines()
    assert told[0] == f"{path}: 7 of 21 rows cannot be used, so none is:"
    assert told[1].startswith("  line 1, field `answer`: there is none")
    assert told[-2:] == [
        "  and 2 more",
        "Correct them, or use the other 14 rows with --skip-bad (skip_bad=True).",
    ]
    found = open_task_set(str(path), skip_bad=True, check=False)
    assert (len(found.instances), len(found.refused)) == (14, 7)
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(ConfigError, match="1 of 1 rows cannot be used"):
        load_task_set(str(path), skip_bad=True)


def test_letters_that_move_a_terminals_cursor_are_shown_as_escapes(load):
    with pytest.raises(ConfigError) as caught:
        load({"\x1b[2J": 1})
    assert "\x1b" not in str(caught.value)
    assert "\\x1b[2J" in str(caught.value)
