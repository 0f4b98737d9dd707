"""How the processes of a job find each other, and what they tell each other beside the data.

`bootstrap` finds rank 0's store; `store` and `groups` are that store, behind the `acceptor` that asks for the job's
secret (`auth`); `control` is a rank's connection to it, which a process's communicators share (`session`). What ranks
decide together is in `rolls`, and on their side in `decisions`. In large jobs all goes through relays: `tree` is the
store's side, `relay` a relay's, `uplink` a member's; `streams` numbers frames and `routes` leads them. When the store
is lost, `succession` finds the process that serves the job from then on, or becomes it; `successors` is that store's
side, which learns its state from what each member keeps of its groups (`membership`, `past`). `hetcoll top` looks on
by `observing`; `questions` are the store's side of that; `announcing` says where stores are on a host. `listener` and
`connector` make the data plane's TCP connections, named by `edges`; `descriptors` hands shared memory around a host.
"""
