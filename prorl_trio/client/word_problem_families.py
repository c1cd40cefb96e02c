"""The families of the word problems: what they calculate, and their wordings, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DIGITS", "DRILLS", "FAMILIES", "NAMES", "THINGS", "Family", "Split"]

Split = Literal["train", "held_out"]


class Family(NamedTuple):
    """A kind of problem.

    Attributes:
        name: of the family.
        expression: Python over the numbers of a problem; its value is the answer.
        solve: the answer; None for numbers that make no problem of the family.
        ranges: what each number of a problem is drawn from.
        train: wordings of the problems that are trained on. {n} and {m} are names, {t} things.
        held_out: wordings of the others.
    """

    name: str
    expression: str
    solve: Callable[..., int | None]
    ranges: dict[str, range]
    train: tuple[str, ...]
    held_out: tuple[str, ...] = ()


DIGITS: Final = range(2, 10)
"""Numbers of one digit."""
_SMALL: Final = range(2, 20)
_LARGE: Final = range(12, 100)

DRILLS: Final = (
    Family(
        "sum",
        "{a} + {b}",
        lambda a, b: a + b,
        {"a": _LARGE, "b": _LARGE},
        ("What is {a} + {b}?", "Compute {a} + {b}.", "Add {a} and {b}.", "{a} plus {b} is what?"),
    ),
    Family(
        "difference",
        "{a} - {b}",
        lambda a, b: a - b if a > b else None,
        {"a": _LARGE, "b": _LARGE},
        ("What is {a} - {b}?", "Compute {a} - {b}.", "Subtract {b} from {a}.", "{a} minus {b} is what?"),
    ),
    Family(
        "product",
        "{a} * {b}",
        lambda a, b: a * b,
        {"a": _LARGE, "b": _SMALL},
        ("What is {a} * {b}?", "Compute {a} * {b}.", "Multiply {a} by {b}.", "{a} times {b} is what?"),
    ),
    Family(
        "quotient",
        "{a} // {b}",
        lambda a, b: a // b if a % b == 0 and a > b else None,
        {"a": _LARGE, "b": _SMALL},
        ("What is {a} / {b}?", "Compute {a} / {b}.", "Divide {a} by {b}."),
    ),
)
"""Bare calculations, which are no problems to train on."""

FAMILIES: Final = (
    Family(
        "spend",
        "{c} - {a} * {b}",
        lambda a, b, c: c - a * b if c > a * b else None,
        {"a": DIGITS, "b": DIGITS, "c": _LARGE},
        (
            "{n} has {c} dollars and buys {a} tickets for {b} dollars each. How many dollars are left?",
            "{n} has {c} {t} and fills {a} boxes with {b} of them each. How many {t} are left?",
            "A book has {c} pages. For {a} days {n} reads {b} pages a day. How many pages are left?",
            "There are {c} chairs in a room. {n} takes away {a} rows of {b} chairs. How many are there now?",
            "Of {c} {t}, {a} bags of {b} are sold. How many {t} are not sold?",
            "{n} had {c} {t} and gave {b} of them to each of {a} friends. How many {t} does {n} still have?",
            "A shop has {c} {t}. It sells {b} {t} an hour for {a} hours. How many {t} remain?",
            "{n} starts with {c} dollars and spends {b} dollars on each of {a} days. How many dollars remain?",
            "A tank holds {c} gallons. Each of {a} buckets takes out {b} gallons. How many gallons remain?",
            "{n} needs {c} {t}. {m} brings {a} bags with {b} {t} in each. How many {t} are still missing?",
            "From a rope of {c} feet {n} cuts {a} pieces of {b} feet each. How many feet of rope remain?",
            "A trip is {c} miles long, and a bus has driven {b} miles an hour for {a} hours. How many miles are left?",
        ),
        (
            "{n} owns {c} coins and pays for {a} meals of {b} coins each. How many coins remain?",
            "A shelf holds {c} {t}. {n} removes {a} rows of {b}. What is the number of {t} on the shelf?",
            "{n} must run {c} miles, and for {a} weeks has run {b} miles every week. How many miles remain?",
        ),
    ),
    Family(
        "loss_twice",
        "{a} - {b} - {c}",
        lambda a, b, c: a - b - c if a > b + c else None,
        {"a": _LARGE, "b": _SMALL, "c": _SMALL},
        (
            "{n} has {a} {t}, gives {b} to {m} and loses {c}. How many {t} are left?",
            "There are {a} {t} in a box. {n} takes out {b}, and {m} takes {c}. How many are there now?",
            "A book has {a} pages. {n} reads {b} pages today and {c} tomorrow. How many pages are left?",
            "{n} has {a} dollars and pays {b} dollars for a bag and {c} for a pen. How many dollars are left?",
            "Of {a} {t}, {b} are broken and {c} are old. How many {t} are neither?",
            "{n} owned {a} {t}. {b} of them broke, and {c} were sold. How many {t} does {n} still own?",
            "A shop has {a} {t}. It sells {b} in the morning and {c} in the evening. How many {t} remain?",
            "From a rope of {a} feet {n} cuts {b} feet, and then {c} feet. How many feet of rope remain?",
            "{n} must read {a} pages, and reads {b} on Monday and {c} on Tuesday. How many pages are still to be read?",
            "{a} people are on a bus. {b} leave at the first stop and {c} at the second. How many people stay?",
            "{n} picks {a} {t}, eats {b} and gives away {c}. What is the number of {t} that are still there?",
        ),
        (
            "{n} owns {a} {t}, hands {b} to {m} and drops {c}. How many {t} remain?",
            "A shelf holds {a} {t}. {n} removes {b}, and later {c}. What is the number of {t} on the shelf?",
            "{n} collected {a} {t}, but {b} were stolen and {c} got lost. How many {t} does {n} still have?",
        ),
    ),
    Family(
        "gain",
        "{a} + {b}",
        lambda a, b: a + b,
        {"a": _LARGE, "b": _LARGE},
        (
            "{n} has {a} {t} and buys {b} more. How many {t} does {n} have?",
            "There are {a} {t} in a box. {n} puts in {b} more. How many are there now?",
            "{n} has {a} {t}. {m} gives {n} {b} more. How many {t} does {n} have now?",
            "{n} has {a} {t} and {m} has {b}. How many {t} do they have together?",
            "{n} picked {a} {t} in the morning and {b} in the evening. How many {t} is that in all?",
            "{n} owns {a} {t} and gets {b} from {m}. How many {t} does {n} own altogether?",
            "A shop has {a} {t}, and {b} more are brought in. How many {t} are in the shop now?",
            "{a} people are on a bus, and {b} get on. How many people are on the bus then?",
            "{n} read {a} pages yesterday and {b} pages today. How many pages did {n} read altogether?",
            "A bag weighs {a} pounds and a box {b} pounds. How many pounds do both weigh?",
            "{n} made {a} {t}, and {m} made {b} {t}. What is the number of {t} that they made?",
        ),
        (
            "{n} owns {a} {t} and finds another {b}. How many {t} does {n} own now?",
            "A shelf holds {a} {t}. {n} adds {b}. What is the number of {t} on the shelf?",
            "{n} got {a} {t} on Monday and {b} {t} on Tuesday. How many {t} altogether?",
        ),
    ),
    Family(
        "loss",
        "{a} - {b}",
        lambda a, b: a - b if a > b else None,
        {"a": _LARGE, "b": _LARGE},
        (
            "{n} has {a} {t} and gives {b} to {m}. How many {t} are left?",
            "There are {a} {t} in a box. {n} takes out {b}. How many are there now?",
            "{n} had {a} {t} and lost {b} of them. How many {t} does {n} have now?",
            "{n} bakes {a} pies and sells {b}. How many pies are not sold?",
            "Of {a} {t}, {b} are broken. How many {t} are not broken?",
            "{n} owned {a} {t}, but sold {b}. How many {t} does {n} still own?",
            "A shop has {a} {t} and sells {b} of them. How many {t} remain in the shop?",
            "{a} people are on a bus, and {b} get off. How many people are still on the bus?",
            "From a rope of {a} feet {n} cuts off {b} feet. How many feet remain?",
            "{n} must read {a} pages and has read {b}. How many pages are still to be read?",
            "There were {a} {t} on a table, and {b} fell off. What is the number of {t} on the table now?",
        ),
        (
            "{n} owns {a} {t} and hands {b} of them to {m}. How many {t} remain?",
            "A shelf holds {a} {t}. {n} removes {b}. What is the number of {t} on the shelf?",
            "{n} collected {a} {t}, but {b} were stolen. How many {t} does {n} still have?",
        ),
    ),
    Family(
        "boxes",
        "{a} * {b}",
        lambda a, b: a * b,
        {"a": _SMALL, "b": _LARGE},
        (
            "There are {a} boxes with {b} {t} in each. How many {t} are there?",
            "{n} buys {a} bags. Each bag has {b} {t}. How many {t} does {n} have?",
            "{n} reads {b} pages each day. How many pages does {n} read in {a} days?",
            "A room has {a} rows of {b} chairs. How many chairs are in the room?",
            "One ticket costs {b} dollars. How many dollars do {a} tickets cost?",
            "{a} friends have {b} {t} each. How many {t} do they have altogether?",
            "{n} packs {a} bags with {b} {t} in every bag. How many {t} does {n} pack?",
            "A shop sells {b} {t} an hour. How many {t} does it sell in {a} hours?",
            "On each of {a} pages {n} draws {b} stars. How many stars does {n} draw?",
            "A bus has {a} benches for {b} people each. How many people can sit in the bus?",
            "{n} works {a} weeks and saves {b} dollars every week. How many dollars does {n} save?",
        ),
        (
            "{n} fills {a} jars. Every jar holds {b} {t}. How many {t} are that?",
            "{n} runs {b} miles every week. How many miles does {n} run in {a} weeks?",
            "A hall has {a} tables, and {b} guests sit at each. How many guests are in the hall?",
        ),
    ),
    Family(
        "share",
        "{a} // {b}",
        lambda a, b: a // b if a % b == 0 and a > b else None,
        {"a": _LARGE, "b": _SMALL},
        (
            "{b} children share {a} {t} equally. How many {t} does each child get?",
            "{n} puts {a} {t} into {b} boxes, the same number in each. How many {t} are in each box?",
            "{n} divides {a} {t} among {b} friends. How many {t} does each friend get?",
            "{a} {t} are packed in bags of {b}. How many bags are there?",
            "{b} tickets cost {a} dollars. How many dollars does one ticket cost?",
            "A room has {a} chairs in {b} equal rows. How many chairs are in each row?",
            "{n} cuts a rope of {a} feet into {b} equal parts. How many feet long is each part?",
            "{a} {t} weigh as much as {b} bricks. How many {t} weigh as much as one brick?",
            "{n} has {a} pages to read in {b} days. How many pages must {n} read each day?",
            "{b} friends split {a} {t} evenly. How many {t} does each of them receive?",
            "{a} people ride in {b} buses, equally many in each. How many people are in every bus?",
            "A shop packs {a} {t} into bags of {b} each. How many bags does it fill?",
            "{n} hands {a} {t} to {b} children, as many to every child. How many {t} does a child get?",
        ),
        (
            "{a} {t} are split evenly between {b} players. How many {t} does every player receive?",
            "{n} fills {b} jars with {a} {t}, equally many in every jar. How many {t} does a jar hold?",
            "A hall seats {a} guests at tables of {b}. How many tables are in the hall?",
        ),
    ),
    Family(
        "pairs",
        "{a} * {b}",
        lambda a, b: a * b,
        {"a": _LARGE, "b": _SMALL},
        (
            "A field is {a} feet long and {b} feet wide. What is its area in square feet?",
            "A car drives {a} miles in an hour. How many miles does it drive in {b} hours?",
            "{n} earns {a} dollars an hour. How many dollars does {n} earn in {b} hours?",
            "A machine makes {a} {t} in a minute. How many {t} does it make in {b} minutes?",
            "Each of {b} boxes weighs {a} pounds. How many pounds do they weigh together?",
            "{n} saves {a} dollars a month. How many dollars does {n} save in {b} months?",
            "A wall is {b} bricks high and {a} bricks wide. How many bricks are in the wall?",
            "A ship sails {a} miles each day. How many miles does it sail in {b} days?",
            "{n} pays {a} dollars a week for a room. How many dollars does {n} pay for {b} weeks?",
            "A page has {a} lines with {b} words in each. How many words are on the page?",
            "{n} plants {b} rows of {a} trees. How many trees does {n} plant?",
        ),
        (
            "A garden is {a} yards long and {b} yards wide. How many square yards is that?",
            "A train goes {a} miles in an hour. How far does it go in {b} hours, in miles?",
            "{n} is paid {a} dollars for a day. How many dollars is {n} paid for {b} days?",
        ),
    ),
    Family(
        "three",
        "{a} + {b} + {c}",
        lambda a, b, c: a + b + c,
        {"a": _LARGE, "b": _LARGE, "c": _LARGE},
        (
            "{n} has {a} red, {b} blue and {c} green {t}. How many {t} does {n} have?",
            "There are {a} {t} in one box, {b} in another and {c} in a third. How many {t} are there in all?",
            "{n} walked {a} steps, then {b} steps, then {c} steps. How many steps is that?",
            "{n} has {a} {t}, buys {b} and finds {c}. How many {t} does {n} have now?",
            "A pen costs {a} cents, a book {b} cents and a bag {c} cents. How many cents do all three cost?",
            "{n} has {a} {t}, {m} has {b} and a friend has {c}. How many {t} do they have altogether?",
            "A shop sold {a} {t} in May, {b} in June and {c} in July. How many {t} did it sell in all?",
            "{n} read {a} pages, then {b} pages and at last {c} pages. How many pages did {n} read altogether?",
            "Three bags weigh {a}, {b} and {c} pounds. How many pounds do they weigh together?",
            "{a} men, {b} women and {c} children are on a ship. How many people are on the ship?",
        ),
        (
            "A shelf holds {a} black, {b} white and {c} yellow {t}. What is the number of {t} on the shelf?",
            "A train has {a} cars, a second one {b} and a third one {c}. How many cars do they have altogether?",
            "{n} got {a} {t} on Monday, {b} on Tuesday and {c} on Friday. How many {t} altogether?",
        ),
    ),
    Family(
        "twice",
        "2 * {a}",
        lambda a: 2 * a,
        {"a": _LARGE},
        (
            "{n} has {a} {t}. {m} has twice as many. How many {t} does {m} have?",
            "What is twice {a}?",
            "Double the number {a}.",
            "{n} is {a} years old. {m} is twice as old. How old is {m}?",
            "A pen costs {a} cents. A book costs twice as much. How many cents does the book cost?",
            "{n} has {a} {t}, and {m} owns two times as many. How many {t} does {m} own?",
            "A bag weighs {a} pounds. A box weighs twice as much. How many pounds does the box weigh?",
            "{n} read {a} pages, and {m} read double that number. How many pages did {m} read?",
            "A rope is {a} feet long. Another one is twice as long. How many feet long is the other rope?",
            "A shop sold {a} {t} in May, and in June twice that number. How many {t} did it sell in June?",
            "How much is two times {a}?",
        ),
        (
            "{n} owns {a} {t}, and {m} owns double that number. How many {t} does {m} own?",
            "A tree is {a} feet tall. A tower is twice as tall. How many feet tall is the tower?",
            "A shelf holds {a} {t}, and a table twice that number. How many {t} are on the table?",
        ),
    ),
    Family(
        "boxes_and_more",
        "{a} * {b} + {c}",
        lambda a, b, c: a * b + c,
        {"a": _SMALL, "b": _SMALL, "c": _LARGE},
        (
            "There are {a} boxes with {b} {t} in each, and {c} more {t}. How many {t} are there?",
            "{n} has {c} {t} and buys {a} bags of {b} {t}. How many {t} does {n} have now?",
            "{n} reads {b} pages a day for {a} days, and then {c} more. How many pages does {n} read?",
            "A room has {a} rows of {b} chairs and {c} other chairs. How many chairs are in the room?",
            "{n} had {c} dollars and earned {b} dollars an hour for {a} hours. How many dollars does {n} have?",
            "{a} friends have {b} {t} each, and {n} has {c}. How many {t} do they have altogether?",
            "{n} packs {a} bags with {b} {t} in every bag, and keeps {c} {t}. How many {t} are there in all?",
            "A shop sells {b} {t} an hour for {a} hours, and then another {c}. How many {t} does it sell?",
            "A bus has {a} benches for {b} people each, and {c} people stand. How many people are on the bus?",
            "{n} pays {b} dollars a week for {a} weeks, and {c} dollars for a bag. How many dollars does {n} pay?",
            "A rope has {a} parts of {b} feet and another one of {c} feet. How many feet long is it?",
        ),
        (
            "{n} fills {a} jars with {b} {t} each and has another {c} {t} on a plate. How many {t} altogether?",
            "{n} owns {c} coins and earns {b} coins a day. How many coins does {n} own after {a} days?",
            "A hall has {a} tables with {b} guests at each, and {c} guests who stand. How many guests are in the hall?",
        ),
    ),
    Family(
        "gap",
        "{a} - {b}",
        lambda a, b: a - b if a > b else None,
        {"a": _LARGE, "b": _LARGE},
        (
            "{n} has {a} {t} and {m} has {b}. How many more {t} does {n} have than {m}?",
            "{n} is {a} years old and {m} is {b}. By how many years is {n} older?",
            "A book costs {a} cents and a pen {b} cents. How many cents more does the book cost?",
            "By how much is {a} larger than {b}?",
            "{n} needs {a} dollars and has {b}. How many dollars does {n} still need?",
            "{n} read {a} pages and {m} read {b}. How many pages fewer did {m} read?",
            "A car drives {a} miles and a bus {b} miles. How many miles farther does the car drive?",
            "What is the difference between {a} and {b}?",
            "A bag weighs {a} pounds and a box {b} pounds. By how many pounds is the bag heavier?",
            "A rope is {a} feet long and another one {b} feet. How many feet longer is the first?",
            "{n} owns {b} {t}, and {m} owns {a}. How many {t} more does {m} own?",
            "A shop sold {a} {t} in May and {b} in June. How many more did it sell in May?",
        ),
        (
            "{n} owns {a} {t}, and {m} owns {b}. How many {t} more than {m} does {n} own?",
            "A tower is {a} feet tall and a tree {b} feet. By how many feet is the tower taller?",
            "{n} scored {a} points and {m} scored {b}. By how many points did {n} win?",
        ),
    ),
    Family(
        "rate",
        "{a} // {b}",
        lambda a, b: a // b if a % b == 0 and a > b else None,
        {"a": _LARGE, "b": _SMALL},
        (
            "{n} drives {a} miles in {b} hours. How many miles is that in one hour?",
            "{n} reads {a} pages in {b} days, the same number each day. How many pages a day is that?",
            "A machine makes {a} {t} in {b} minutes. How many {t} does it make in one minute?",
            "{n} earns {a} dollars in {b} hours. How many dollars does {n} earn in an hour?",
            "{n} walks {a} steps in {b} minutes. How many steps is that each minute?",
            "A car needs {a} gallons for {b} trips. How many gallons does it need for one trip?",
            "In {b} days {n} eats {a} {t}, as many on one day as on any other. How many {t} does {n} eat a day?",
            "It rained {a} inches in {b} months. How many inches is that for each month?",
            "A ship sails {a} miles in {b} days. How far does it sail in one day, in miles?",
            "{n} pays {a} dollars for {b} weeks. How many dollars is that for one week?",
            "A shop sells {a} {t} in {b} hours, as many in every hour. How many {t} does it sell each hour?",
            "{n} writes {a} lines on {b} pages, equally many on every page. How many lines are on one page?",
        ),
        (
            "A train goes {a} miles in {b} hours. How many miles does it go in one hour?",
            "{n} is paid {a} dollars for {b} days. How many dollars is {n} paid for a day?",
            "{n} runs {a} laps in {b} weeks, equally many every week. How many laps a week is that?",
        ),
    ),
)  # fmt: skip

NAMES: Final[dict[Split, tuple[str, ...]]] = {
    "train": ("Tom", "Anna", "Ben", "Lucy", "Sam", "Mia", "Paul", "Ella", "Max", "Rose"),
    "held_out": ("Jack", "Nina", "Leo", "Clara", "Oscar", "Ruth"),
}
THINGS: Final[dict[Split, tuple[str, ...]]] = {
    "train": ("apples", "books", "cards", "stamps", "pencils", "cookies", "shells", "balloons", "eggs", "toys"),
    "held_out": ("marbles", "plums", "beads", "stickers", "rings", "candles"),
}
