"""How the processes of a job find each other, and what they tell each other beside the data.

`bootstrap` finds rank 0's `store`. `control` is a rank's connection to it, which a process's communicators share
(`session`); by `decisions` ranks decide together. In large jobs all goes through relays: `relay` is one, and `uplink` a
member's end of it. When the store is lost, `succession` finds the process that serves the job from then on, or becomes
it; the new store learns its state from what each member keeps of its groups (`membership`). `hetcoll top` looks on by
`observing`. Sockets and secrets are in `connections`, frames in `protocol`.
"""
