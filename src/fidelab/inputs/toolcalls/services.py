"""Domains of dialogues: orders, units, buildings and trains."""

from __future__ import annotations

from random import Random

from fidelab.inputs.toolcalls.dialogue import (
    FLAG,
    NUMBER,
    TEXT,
    WHOLE,
    Step,
    array_of,
    described,
    object_of,
    one_of,
    tool,
)

# ------------------------------------------------------------------------------------------------------------- orders

_SHIPPING = object_of({"street": TEXT, "city": TEXT, "country": described(TEXT, "two letters")}, {"floor": WHOLE})
ORDERS = (
    tool(
        "place_order",
        "Order articles.",
        {"items": array_of(object_of({"article": TEXT, "quantity": WHOLE})), "shipping": _SHIPPING},
        {"gift": {**FLAG, "default": False}},
    ),
    tool("order_status", "Ask for the status of an order.", {"order": TEXT}),
    tool("change_quantity", "Change how many pieces are ordered.", {"order": TEXT, "article": TEXT, "quantity": WHOLE}),
    tool(
        "refund",
        "Refund a part of an order.",
        {"order": TEXT, "amount": NUMBER, "currency": one_of("EUR", "USD", "CHF")},
        {"note": TEXT},
    ),
)


def orders(draw: Random) -> list[Step]:
    """Place an order, ask for it, change a quantity, refund."""
    first, second = draw.sample(["KB-204", "MX-77", "LD-310", "CH-42", "PW-900"], 2)
    counts, order = draw.sample(range(2, 30), 3), f"A{draw.randrange(10_000, 99_999)}"
    city, country = draw.choice([("Bergen", "NO"), ("Ghent", "BE"), ("Turin", "IT"), ("Graz", "AT"), ("Cork", "IE")])
    street, floor = (
        f"{draw.choice(['Mill Road', 'Dock Street', 'Park Lane'])} {draw.randrange(1, 90)}",
        draw.randrange(1, 9),
    )
    amount, currency = round(draw.uniform(3, 90), 2), draw.choice(["EUR", "USD", "CHF"])
    new = f"A{draw.randrange(10_000, 99_999)}"
    return [
        Step(
            f"Order {counts[0]} of {first} and {counts[1]} of {second} as a gift. Ship to {street}, {city}, {country}, "
            f"floor {floor}.",
            "place_order",
            {
                "items": [{"article": first, "quantity": counts[0]}, {"article": second, "quantity": counts[1]}],
                "shipping": {"street": street, "city": city, "country": country, "floor": floor},
                "gift": True,
            },
            {"order": order},
            "The order is placed.",
        ),
        Step(
            "What is its status?",
            "order_status",
            {"order": order},
            {"status": "packing"},
            "It is being packed.",
        ),
        Step(
            f"I need {counts[2]} of {second} instead.",
            "change_quantity",
            {"order": order, "article": second, "quantity": counts[2]},
            {"changed": True},
            "The quantity is changed.",
        ),
        Step(
            f'I was charged too much: refund {amount} {currency} with the note "price match".',
            "refund",
            {"order": order, "amount": amount, "currency": currency, "note": "price match"},
            {"refunded": True},
            "The refund is on its way.",
        ),
        Step(
            f"Place another order for one {first}, no gift, to {street}, {city}, {country}. Leave the floor out.",
            "place_order",
            {
                "items": [{"article": first, "quantity": 1}],
                "shipping": {"street": street, "city": city, "country": country},
            },
            {"order": new},
            f"That is order {new}.",
        ),
    ]


# -------------------------------------------------------------------------------------------------------------- units

_LENGTHS = {"m": 1.0, "km": 1000.0, "mile": 1609.344, "foot": 0.3048}  # in metres
_MASSES = {"kg": 1.0, "lb": 0.45359237, "oz": 0.028349523125, "t": 1000.0}  # in kilograms
UNITS = (
    tool(
        "convert_length",
        "Convert a length.",
        {"value": NUMBER, "source": one_of(*_LENGTHS), "target": one_of(*_LENGTHS)},
        {"digits": described(WHOLE, "after the point")},
    ),
    tool(
        "convert_mass",
        "Convert a mass.",
        {"value": NUMBER, "source": one_of(*_MASSES), "target": one_of(*_MASSES)},
        {"digits": described(WHOLE, "after the point")},
    ),
    tool(
        "convert_many",
        "Convert several temperatures.",
        {"values": array_of(NUMBER), "source": one_of("C", "F", "K"), "target": one_of("C", "F", "K")},
    ),
    tool(
        "save_result",
        "Save a result.",
        {"label": TEXT, "quantity": object_of({"value": NUMBER, "unit": TEXT})},
        {"pinned": {**FLAG, "default": False}},
    ),
)


def units(draw: Random) -> list[Step]:
    """Convert, save the result that came back, convert another, and several at once."""
    source, target = draw.sample(sorted(_LENGTHS), 2)
    value, digits = round(draw.uniform(2, 900), 1), draw.randrange(4, 7)
    result = round(value * _LENGTHS[source] / _LENGTHS[target], digits)
    heavy, light = draw.sample(sorted(_MASSES), 2)
    mass = draw.randrange(40, 800)
    answer = float(f"{mass * _MASSES[heavy] / _MASSES[light]:.6g}")
    label = draw.choice(["track", "fence", "cable", "runway"])
    values = [round(draw.uniform(280, 400), 1) for _ in range(3)]
    of, to = draw.sample(["C", "F", "K"], 2)
    celsius = [{"C": x, "F": (x - 32) / 1.8, "K": x - 273.15}[of] for x in values]
    converted = [round({"C": x, "F": 1.8 * x + 32, "K": x + 273.15}[to], 2) for x in celsius]
    return [
        Step(
            f"Convert {value} {source} to {target}, with {digits} digits after the point.",
            "convert_length",
            {"value": value, "source": source, "target": target, "digits": digits},
            {"value": result},
            f"{result} {target}.",
        ),
        Step(
            f'Save this result with the label "{label}" and pin it.',
            "save_result",
            {"label": label, "quantity": {"value": result, "unit": target}, "pinned": True},
            {"saved": True},
            "It is saved.",
        ),
        Step(
            f"Convert {mass} {heavy} to {light}, with as many digits as there are.",
            "convert_mass",
            {"value": mass, "source": heavy, "target": light},
            {"value": answer},
            f"{answer} {light}.",
        ),
        Step(
            'Save that with the label "load". Do not pin it.',
            "save_result",
            {"label": "load", "quantity": {"value": answer, "unit": light}},
            {"saved": True},
            "It is saved, too.",
        ),
        Step(
            f"Convert the temperatures {values[0]}, {values[1]} and {values[2]} from {of} to {to}.",
            "convert_many",
            {"values": values, "source": of, "target": to},
            {"values": converted},
            "Here they are.",
        ),
    ]


# ----------------------------------------------------------------------------------------------------------- building

_ROOMS = ("lobby", "kitchen", "workshop", "archive", "greenhouse")
BUILDING = (
    tool(
        "set_climate",
        "Set temperature and fan of a room.",
        {"room": one_of(*_ROOMS), "climate": object_of({"celsius": NUMBER, "fan": one_of("off", "low", "high")})},
    ),
    tool("read_sensor", "Read a sensor.", {"room": one_of(*_ROOMS), "sensor": one_of("humidity", "light", "co2")}),
    tool(
        "schedule_light",
        "Switch the light of rooms at a time.",
        {"rooms": array_of(one_of(*_ROOMS)), "time": described(TEXT, "HH:MM"), "on": FLAG},
        {"brightness": described(WHOLE, "percent")},
    ),
    tool(
        "set_alarm",
        "Warn when a sensor passes a limit.",
        {"room": one_of(*_ROOMS), "sensor": one_of("humidity", "light", "co2"), "above": NUMBER},
        {"repeat": {**FLAG, "default": False}},
    ),
)


def building(draw: Random) -> list[Step]:
    """Set a climate, read a sensor, warn above what it read, switch lights."""
    first, second = draw.sample(_ROOMS, 2)
    sensor, fan = draw.choice(["humidity", "light", "co2"]), draw.choice(["off", "low", "high"])
    celsius, read = round(draw.uniform(15, 26), 1), round(draw.uniform(20, 80), 1)
    late, early = f"{draw.randrange(18, 24)}:{draw.choice(['05', '20', '50'])}", f"0{draw.randrange(5, 9)}:10"
    percent = draw.randrange(10, 95, 5)
    return [
        Step(
            f"Set the {first} to {celsius} degrees Celsius, fan {fan}.",
            "set_climate",
            {"room": first, "climate": {"celsius": celsius, "fan": fan}},
            {"set": True},
            "It is set.",
        ),
        Step(
            f"Read the {sensor} sensor in the {second}.",
            "read_sensor",
            {"room": second, "sensor": sensor},
            {"value": read},
            f"It reads {read}.",
        ),
        Step(
            "Warn me, again and again, when it is above this value.",
            "set_alarm",
            {"room": second, "sensor": sensor, "above": read, "repeat": True},
            {"armed": True},
            "The alarm is armed.",
        ),
        Step(
            f"Switch the light on at {early} in the {first} and the {second}, at {percent} percent.",
            "schedule_light",
            {"rooms": [first, second], "time": early, "on": True, "brightness": percent},
            {"scheduled": True},
            "It is scheduled.",
        ),
        Step(
            f"And off at {late}, in the {second} only.",
            "schedule_light",
            {"rooms": [second], "time": late, "on": False},
            {"scheduled": True},
            "Done.",
        ),
    ]


# ------------------------------------------------------------------------------------------------------------- trains

_CLASS = one_of("first", "second", default="second")
TRAINS = (
    tool(
        "search_trains",
        "Search connections.",
        {"origin": TEXT, "destination": TEXT, "date": described(TEXT, "YYYY-MM-DD"), "passengers": WHOLE},
        {"direct": {**FLAG, "default": False}},
    ),
    tool(
        "book_train",
        "Book seats in a train.",
        {"train": TEXT, "seats": array_of(object_of({"car": WHOLE, "seat": TEXT}))},
        {"class": _CLASS},
    ),
    tool(
        "change_booking",
        "Change a booking.",
        {"booking": TEXT, "change": object_of({"field": one_of("date", "train"), "value": TEXT})},
    ),
    tool(
        "send_ticket",
        "Send the ticket of a booking.",
        {"booking": TEXT, "channel": one_of("mail", "print", "app")},
        {"receipt": {**FLAG, "default": False}},
    ),
)


def trains(draw: Random) -> list[Step]:
    """Search, book seats in a train that was found, change the booking, send the ticket."""
    origin, destination = draw.sample(["Lyon", "Basel", "Bologna", "Utrecht", "Malmo", "Brno", "Porto"], 2)
    dates = [f"2031-{draw.randrange(1, 13):02}-{draw.randrange(1, 28):02}" for _ in range(2)]
    found, at = [f"{draw.choice(['IC', 'EC', 'RJ'])} {n}" for n in draw.sample(range(100, 999), 3)], draw.randrange(3)
    car, booking = draw.randrange(1, 14), "".join(draw.choices("BCDFGHJKLMNP", k=6))
    seats = [f"{draw.randrange(1, 90)}{letter}" for letter in "AB"]
    channel, where = draw.choice(["mail", "print", "app"]), ("first", "second", "third")[at]
    return [
        Step(
            f"Search direct trains from {origin} to {destination} on {dates[0]} for two passengers.",
            "search_trains",
            {"origin": origin, "destination": destination, "date": dates[0], "passengers": 2, "direct": True},
            {"trains": found},
            f"There are {len(found)} trains.",
        ),
        Step(
            f"Book seats {seats[0]} and {seats[1]} in car {car} of the {where} train, first class.",
            "book_train",
            {"train": found[at], "seats": [{"car": car, "seat": seat} for seat in seats], "class": "first"},
            {"booking": booking},
            f"The booking is {booking}.",
        ),
        Step(
            f"Change the date of the booking to {dates[1]}.",
            "change_booking",
            {"booking": booking, "change": {"field": "date", "value": dates[1]}},
            {"changed": True},
            "The date is changed.",
        ),
        Step(
            f"Send the ticket by {channel}, with a receipt.",
            "send_ticket",
            {"booking": booking, "channel": channel, "receipt": True},
            {"sent": True},
            "It was sent.",
        ),
        Step(
            f"Now the way back on {dates[1]}: search trains for one passenger; changes on the way are fine.",
            "search_trains",
            {"origin": destination, "destination": origin, "date": dates[1], "passengers": 1},
            {"trains": found[:1]},
            "There is one.",
        ),
    ]
