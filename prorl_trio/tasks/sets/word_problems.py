"""Generated and seeded sums and short word problems, in twelve families, for tiny models and for training.

Training and held-out problems share no wording, name, thing or number. A policy that solves held-out problems has
learned to understand such problems, not to recall them.
"""

from __future__ import annotations

import re
from random import Random
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from prorl_trio.types.models import TaskInstance

if TYPE_CHECKING:
    from collections.abc import Callable


Split = Literal["train", "held_out"]


class Family(NamedTuple):
    """A kind of problem.

    Attributes:
        name: of the family.
        expression: Python over the numbers of a problem; its value is the answer.
        solve: the answer; None if the numbers do not form a problem of the family.
        ranges: from which each number of a problem is drawn.
        train: wordings of the training problems. {n} and {m} are names, {t} things.
        held_out: wordings of the held-out problems.
    """

    name: str
    expression: str
    solve: Callable[..., int | None]
    ranges: dict[str, range]
    train: tuple[str, ...]
    held_out: tuple[str, ...] = ()


DIGITS: Final = range(2, 10)
"""One-digit numbers."""
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
"""Bare calculations, which are not training problems."""

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
            "{n} has {c} pages of paper and writes {a} letters of {b} pages each. How many pages are unused?",
            "A farm has {c} cows, and {a} trucks take {b} cows each to another farm. How many cows stay?",
            "{n} cooks {c} potatoes, and each of {a} people eats {b}. How many potatoes are left over?",
            "{n} can carry {c} pounds and has {a} bricks of {b} pounds each. How many more pounds can {n} carry?",
            "{c} seats are in a bus, and {a} groups of {b} people get on. How many seats are still free?",
            "{n} wants to plant {c} trees, and plants {b} a day for {a} days. How many are still to be planted?",
            "{a} teams of {b} children leave a school of {c} children. How many children remain in the school?",
            "{n} buys {c} {t}, packs {a} of {b} {t} for friends, and keeps the others. How many {t} does {n} keep?",
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
            "{n} has {a} minutes. The bus takes {b} and the walk {c}. How many minutes does {n} have left?",
            "A farm has {a} cows. {b} are sold in spring and {c} in autumn. How many cows does the farm still have?",
            "Out of {a} seats, men take {b} and women take {c}. How many seats are still free?",
            "{n} baked {a} pies. {m} ate {b}, and a dog ate {c}. How many pies remained?",
            "A tank holds {a} gallons. It leaks {b} gallons at night and {c} by day. How many gallons are in it then?",
            "{n} has to drive {a} miles, drives {b}, rests, and drives {c}. How many miles are still ahead?",
            "In a school of {a} children, {b} are ill and {c} are away. How many are at school?",
            "{n} weighed {a} pounds and has lost {b} in winter and {c} in summer. How many pounds does {n} weigh?",
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
            "{n} drove {a} miles, and after lunch another {b}. How many miles did {n} drive?",
            "A farm with {a} cows gets {b} new ones. What is its number of cows now?",
            "{n} paid {a} dollars for shoes and {b} dollars for a hat. What did {n} pay in total?",
            "{a} boys and {b} girls go to a school. How many children go there?",
            "A tree grew {a} inches one year and {b} inches the next. By how many inches did it grow in both years?",
            "{n} weighed {a} pounds and has put on {b}. How many pounds does {n} weigh today?",
            "In one bowl are {a} {t}, in the other {b}. What is the total?",
            "{n} is {a} years old. How old will {n} be in {b} years?",
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
            "{n} had {a} dollars and paid {b} for a hat. How many dollars does {n} still have?",
            "Of {a} children in a school, {b} are boys. How many are girls?",
            "A tank held {a} gallons, and {b} leaked out. How many gallons are in it?",
            "{n} baked {a} pies, and {m} ate {b}. How many pies are there now?",
            "{n} is {a} years old. How old was {n} {b} years ago?",
            "A farm had {a} cows, and {b} ran away. What is its number of cows now?",
            "{a} birds sat on a roof until {b} flew away. How many birds stayed?",
            "{n} has to drive {a} miles and is {b} miles on the way. How many miles are ahead?",
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
            "{a} trucks carry {b} cows each. What is the total number of cows?",
            "{n} writes {a} letters of {b} lines each. How many lines does {n} write?",
            "Every child gets {b} {t}, and there are {a} children. How many {t} are needed?",
            "{n} does {b} jumps, {a} times. How many jumps is that?",
            "A house has {a} floors with {b} windows on every floor. How many windows does it have?",
            "A set has {b} {t}. {n} orders {a} sets. How many {t} does {n} order?",
            "{n} takes {b} photos on each of {a} trips. What is the number of photos?",
            "A farmer has {a} pens, each for {b} sheep. How many sheep have room?",
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
            "{n} lays {a} {t} on {b} plates, with no difference between them. How many {t} are on one plate?",
            "{a} cows are spread evenly over {b} fields. What is the number of cows in one field?",
            "{n} pours {a} gallons into {b} buckets, the same into every one. How many gallons are in a bucket?",
            "A team of {b} must carry {a} bricks, each as many as the others. How many bricks does each of them carry?",
            "{n} deals {a} cards to {b} players, all the same number. How many cards does one player have?",
            "{n} needs {b} eggs for a cake and has {a} eggs. How many cakes can {n} bake?",
            "A book of {a} pages has {b} parts of the same length. How many pages long is a part?",
            "{a} children form teams of {b}. How many teams is that?",
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
            "A floor measures {a} by {b} feet. How many square feet is it?",
            "{n} types {a} words a minute. How many words does {n} type in {b} minutes?",
            "One hat costs {a} dollars. What do {b} hats cost, in dollars?",
            "A cow gives {a} pints of milk a day. How many pints does it give in {b} days?",
            "A plane flies {b} times a week with {a} people. How many people does it carry in a week?",
            "A roof needs {a} tiles in a line, and has {b} lines. How many tiles does it need?",
            "{n} climbs {b} stairs with {a} steps each. How many steps does {n} climb?",
            "A tap fills {a} gallons an hour. How many gallons has it filled after {b} hours?",
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
            "{n} drove {a} miles on one day, {b} on the next and {c} on the last. How far did {n} drive, in miles?",
            "A farm has {a} cows, {b} pigs and {c} sheep. How many animals is that?",
            "{n} paid {a} dollars for shoes, {b} for a hat and {c} for a coat. What did {n} pay in total, in dollars?",
            "The sides of a field are {a}, {b} and {c} feet long. How many feet long is the way around it?",
            "{n} is {a}, {m} is {b} and their father {c} years old. How many years is that together?",
            "{n} scored {a}, {b} and {c} in a game. What is the sum?",
            "A house has {a} windows in front, {b} behind and {c} at the sides. How many windows has it?",
            "{a} letters came first, {b} later, and {c} in the end. How many letters came?",
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
            "{n} paid {a} dollars, and {m} paid double. How many dollars did {m} pay?",
            "A house has {a} windows, and a school has twice as many. How many windows has the school?",
            "{n} drove {a} miles there and the same way back. How many miles did {n} drive?",
            "A cat weighs {a} pounds, and a dog is twice as heavy. How many pounds does the dog weigh?",
            "There are {a} boys, and as many girls. How many children are there?",
            "{n} needs {a} minutes, and {m} needs double the time. How many minutes does {m} need?",
            "A farm with {a} cows doubles their number. How many cows does it have then?",
            "Two bags hold {a} {t} each. How many {t} do both hold?",
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
            "{n} buys {a} hats for {b} dollars each and a coat for {c}. What does {n} pay in total, in dollars?",
            "A farm has {a} fields of {b} cows, and {c} cows at home. How many cows has it?",
            "{n} writes {a} letters of {b} lines and one of {c} lines. How many lines does {n} write?",
            "A house has {a} floors with {b} windows each, and {c} windows in its roof. How many windows has it?",
            "{n} had {c} stars, and {m} drew {b} more on each of {a} pages. What is the number of stars now?",
            "{n} drives {c} miles to town, and then {a} times {b} miles. How many miles does {n} drive?",
            "A plant is {c} inches tall and grows {b} inches a month. How many inches tall is it after {a} months?",
            "{a} teams of {b} children and {c} parents go on a trip. How many people go?",
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
            "{n} drove {a} miles and {m} drove {b}. How much farther did {n} drive, in miles?",
            "A dog weighs {a} pounds, a cat {b}. How many pounds more does the dog weigh?",
            "A school has {a} boys and {b} girls. How many more boys than girls is that?",
            "{n} has {b} {t} and wants {a}. How many {t} must {n} still get?",
            "It was {b} degrees at night and {a} by day. By how many degrees was the day warmer?",
            "{n} paid {b} dollars and {m} paid {a}. How many dollars less did {n} pay?",
            "A farm has {a} cows, and another has {b}. By how many do they differ?",
            "{n} needs {a} minutes for a way and {m} needs {b}. How many minutes faster is {m}?",
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
            "{n} types {a} words in {b} minutes. How many words does {n} type a minute?",
            "{b} cows give {a} pints of milk. How many pints does one cow give?",
            "In {b} hours a tap fills {a} gallons. How many gallons is that in every hour?",
            "{n} spends {a} dollars in {b} months, each month the same. How many dollars does {n} spend a month?",
            "A plane carries {a} people on {b} flights. How many people is that for each flight?",
            "A plant grew {a} inches in {b} weeks. How many inches did it grow in a week?",
            "{n} took {a} photos on {b} trips, equally many on each. How many photos is that for one trip?",
            "{n} needs {a} minutes for {b} miles. How many minutes does {n} need for a mile?",
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


class WordProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem and its answer, which is the value of `expression`, in Python.

    `problem_id` begins with its family and a hyphen.
    """

    problem_id: str
    family: str
    question: str
    answer: int
    expression: str

    @property
    def program(self) -> str:
        """Return a line of Python that prints the answer."""
        return f"print({self.expression})"

    def instance(self, **payload: object) -> TaskInstance:
        """Return it as an instance for the handler `math`; `payload` contains more fields of `MathPayload`."""
        return TaskInstance(
            instance_id=self.problem_id,
            handler="math",
            payload={"question": self.question, "answer": str(self.answer), **payload},
            family=self.family,
        )


EASY: Final = tuple(
    family
    for family in (*DRILLS, *FAMILIES)
    if family.name in ("sum", "difference", "product", "gain", "boxes", "twice")
)
"""Families of which an untrained model solves some problems."""

RIGHTLY: Final = 0.2
"""Share of the demonstrations with the correct calculation, not counting chance hits."""
OPERATIONS: Final = ("+", "-", "*", "//")
_OPERATION: Final = re.compile(r"//|[-+*]")


def held_out_number(number: int) -> bool:
    """Return whether problems with this number are held out: every fourth number is."""
    return number % 4 == 3


def demonstrated(number: int, *, seed: int = 0) -> WordProblem:
    """Return demonstration `number`, which shows a policy how to calculate, but rarely how to understand a question.

    The operations are correct in `RIGHTLY` of the problems, so that each family's operations occur, and random in the
    others. `answer` is the output of the program, correct or not.
    """
    problem = _problem(FAMILIES, number, "train", f"demonstrated-{seed}")
    rng = Random(f"operations-{seed}-{number}")
    if rng.random() < RIGHTLY:
        return problem
    expression = _OPERATION.sub(lambda _: rng.choice(OPERATIONS), problem.expression)
    return msgspec.structs.replace(problem, expression=expression, answer=_value(expression))


def easy_problem(number: int, *, seed: int = 0) -> WordProblem:
    """Return a drill or a training problem of an easy family; all its numbers have one digit (except the answer)."""
    return _problem(EASY, number, "train", f"easy-{seed}", among=DIGITS)


def word_problem(number: int, *, split: Split = "train", seed: int = 0, family: str | None = None) -> WordProblem:
    """Return problem `number` of a split: a pure function.

    The families rotate, so any twelve consecutive problems contain each family once, unless `family` is given.
    """
    families = tuple(each for each in FAMILIES if family in (None, each.name))
    return _problem(families, number, split, f"{split}-{seed}")


def word_problems(count: int, *, split: Split = "train", seed: int = 0, start: int = 0) -> list[WordProblem]:
    """Return `count` problems from number `start` on; multiples of twelve contain equally many of each family."""
    return [word_problem(number, split=split, seed=seed) for number in range(start, start + count)]


def _value(expression: str) -> int:
    """Return the value of one of our expressions: numbers and operations."""
    value: int = eval(expression, {"__builtins__": {}})
    return value


def _problem(
    families: tuple[Family, ...], number: int, split: Split, stream: str, among: range | None = None
) -> WordProblem:
    family = families[number % len(families)]
    rng = Random(f"{stream}-{number}")
    numbers, answer = _numbers(family, split, rng, among)
    wording = rng.choice(family.train if split == "train" else family.held_out)
    first, second = rng.sample(NAMES[split], 2)
    return WordProblem(
        problem_id=f"{family.name}-{stream}-{number}",
        family=family.name,
        question=wording.format(n=first, m=second, t=rng.choice(THINGS[split]), **numbers),
        answer=answer,
        expression=family.expression.format(**numbers),
    )


def _numbers(family: Family, split: Split, rng: Random, among: range | None) -> tuple[dict[str, int], int]:
    """Draw numbers of the split until they make a problem; return them with its answer."""
    while True:
        numbers = {name: rng.choice(among or values) for name, values in family.ranges.items()}
        if all(held_out_number(number) == (split == "held_out") for number in numbers.values()):
            answer = family.solve(**numbers)
            if answer is not None:
                return numbers, answer
