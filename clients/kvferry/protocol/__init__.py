"""The protocol without I/O: plain machines that are fed events and return effects.

A machine reads no clock, waits for nothing, starts nothing and knows no wire. `on(event, now)` changes the machine
alone and returns what has to be done, in this order. An event that is refused raises a KvferryError and changes
nothing. Each machine has `check()`, its invariants, and `sizes()`, how much it keeps.

The shells that turn messages, timers and tasks into events are in the daemon and the clients. The simulator in
tests/simulation runs the same machines, without any shell.

    states.py    how a lease stands, and its moves       serving.py   one reader's stream: what it is still to be told
    readers.py   the readers of one lease, counted       events.py    all that is said to the machines and by them
    lease.py     one lease: publishes, fences, its end   source.py    both together: one engine rank as a source
    leases.py    all leases of an engine rank            kept.py      collections that are bounded; timers
    packing.py   what is gathered into slots for a reader, packing_events.py

    waits.py     readers that wait for a publish         values.py    readers, publishes, accounts of leases

    transfer.py  one rank's attempt, from the rendezvous to the verdict (transfer_events.py)
    reading.py   one source rank as that attempt reads it: its lease, and what the source is asked
    one_lease.py all parts of an attempt are of one lease
    attempts.py  which attempt; why one is refused       requests_events.py  all that is said to it and by it
    parts.py     the newest attempts, and what waits     requests.py  orders and reservations of one daemon
    claims.py    blocks that may still be written        leader.py    rank 0: hands on, gathers (leader_events.py)

    peers.py     the peers of one engine of ours (peers_events.py): peers_wanted.py, whom to meet; peers_asked.py, hands
                 that are shaken; peers_homes.py, the owner of each engine id
    roster.py    how the ranks of one engine find each other (roster_events.py)

    book.py      the client's half: what an engine has published and receives (book_events.py, book_values.py)
    session.py   one session: open, lost, its end        session_events.py  all that is said to it and by it
    sessions.py  one session for each engine
    keeper.py    which daemon serves, and stands by      keeper_events.py   all that is said to it and by it
"""
