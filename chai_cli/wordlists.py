"""English words that are not entities, and the doubtful nouns in -ing: what `entities` and `tagging` look up."""

from __future__ import annotations

import re


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Counting words that stand before a noun like adjectives.
COUNTS = words(
    "few several many much more most some any all both each every other another various multiple numerous countless single "
    "double lone dozen hundred thousand million such same own certain different next last first second third"
)
# Quality, lens and render words: dropped wherever they stand.
STYLE = words(
    "4k 8k 2k hd uhd fhd hdr 1080p 720p 2160p 60fps 24fps 3d 2d cinematic photorealistic photo-realistic realistic hyperrealistic "
    "hyper-realistic ultra-realistic ultrarealistic surreal cartoonish stylized high-quality high-resolution high-definition "
    "hi-res ultra-detailed ultra-hd highly-detailed hyper-detailed masterpiece award-winning professional best super ultra hyper "
    "slow-motion slow-mo timelapse time-lapse close-up closeup wide-angle low-angle high-angle first-person third-person "
    "full-body medium-shot long-shot establishing tracking panning trending octane unreal"
)
# Heads that say how the picture is made: the whole phrase goes ("surrealism style", "smooth motion", "an intense effect").
MANNER = words(
    "style quality resolution definition effect motion focus detail camera lens zoom pan tilt dolly bokeh aspect ratio fps "
    "perspective angle exposure viewpoint pov movement technique composition depth fidelity realism surrealism aesthetic timelapse "
    "time-lapse closeup close-up lapse hyperlapse cgi artstation engine render rendering hdr"
)
# Heads that mean the picture itself: they go, and a noun before them stays ("a desert scene" is a desert).
PICTURE = words(
    "scene view video clip footage film movie image picture photo photograph photography shot frame tableau animation screenshot "
    "wallpaper setting backdrop"
)
# The same words and these, but only before "of": "a painting of a cat" shows a cat, "a painting on the wall" a painting.
MEDIA = words("painting drawing sketch portrait illustration model depiction close-up closeup")
# Words before "of" that count, measure or point: "a group of dogs", "the heart of the city", "a touch of charm".
MEASURES = words(
    "group pair row lot bunch couple variety array series number kind type sort piece bit touch sense flock herd pack swarm crowd "
    "set collection handful dozen hundred thousand mixture mix range symphony tapestry layer wisp hint body heart middle edge side "
    "top bottom left right front back center centre corner end rest part presence glow expanse plenty multitude amount cluster shade "
    "bouquet abundance sea ocean blanket canvas stretch line"
)
# Words with nothing to see in them, dropped alone and with adjectives.
ABSTRACT = words(
    "time moment instant sense feeling mood atmosphere ambiance ambience vibe essence beauty tranquility serenity calmness peace "
    "peacefulness stillness silence presence charm elegance grace wonder awe mystery magic nostalgia energy life love joy happiness "
    "excitement way kind type sort manner speed pace rhythm air distance contrast balance harmony depth texture pattern detail hue "
    "tone color colour gradient effect display spectacle contemplation concentration determination focus attention anticipation "
    "intensity movement motion gesture expression demeanor passion precision skill purpose story tale history era past future "
    "present nature feel touch hint blend mix combination array variety left right top bottom front back side center centre middle "
    "end beginning foreground surrounding surroundings backdrop setting lot bit part rest up down one other something anything "
    "activity action effort experience journey task work use home look pose position direction place spot point turn progress "
    "addition case example reason result fact idea thought memory dream conversation laughter enthusiasm confidence curiosity "
    "warmth comfort coziness solitude reflection transition backdrops everything nothing everyone someone anyone nobody total symbol legacy "
    "witness passage testament reminder glamour freedom sound hum call interplay juxtaposition aroma delight shift grandeur artistry "
    "contentment relaxation sophistication exploration surprise element connection spirit play romance isolation performance fusion "
    "arrangement feature strength power form viewer midst myriad adventure satisfaction appreciation craftsmanship unison world "
    "emotion pleasure comfort whimsy indulgence health professionalism technology companionship pm am"
)
# Endings of nouns for a quality: "calmness", "simplicity", "solitude".
QUALITY = re.compile(r".{3,}(?:ness|manship|itude|ality|ility|icity|osity|ivity|fulness)")
# Colours are entities only with a thing that has them ("hues of deep blue").
COLOURS = words(
    "red yellow green blue purple pink white black gray grey brown violet beige navy turquoise crimson scarlet magenta"
)
# Words that say something only with an adjective or a noun before them ("small red object", "black background").
BARE = words("object thing item background foreground area environment")
# Nouns in -ing that are things: after another noun any other word in -ing is taken for what that noun does.
THINGS_IN_ING = words(
    "building ceiling clothing lighting wedding railing bedding flooring morning evening seating sibling being awning icing "
    "dressing frosting stocking earring helping opening carving engraving offspring topping housing piping siding fencing wiring"
)
# What a thing is for, when another noun follows: "a mahogany dining table".
USES_IN_ING = words("dining living parking sewing rocking shopping washing racing rolling")
# And these after an adjective that may be a noun ("a red painting"), though not after a noun ("a man painting").
WORKS_IN_ING = words("painting drawing gathering meeting crossing landing parking swing greeting recording reading")
