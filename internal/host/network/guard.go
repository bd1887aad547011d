package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"capstan.dev/capstan/internal/atomicfile"
)

const (
	// guardPause is for how long GuardFirewalls rests when it cannot do its work.
	guardPause = 10 * time.Second
	// guardRest is for how long it does after it mended something: whoever removes it again at once is not to keep the box busy.
	guardRest = time.Second
)

// GuardFirewalls puts the rules of this capstand's networks back as soon as something else on the box has removed them, as a
// reload of the host's own firewall does (`flush ruleset`). It returns when ctx is done.
func (b Box) GuardFirewalls(ctx context.Context, log *slog.Logger) {
	for ctx.Err() == nil {
		err := b.guardFirewalls(ctx, log)
		if ctx.Err() != nil {
			return
		}
		log.Error("the firewall of networks cannot be guarded", "error", err)
		rest(ctx, guardPause)
	}
}

func rest(ctx context.Context, pause time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(pause):
	}
}

func (b Box) guardFirewalls(ctx context.Context, log *slog.Logger) error {
	changes, err := nl.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return fmt.Errorf("subscribing to changes of nftables: %w", err)
	}
	defer changes.Close()
	defer context.AfterFunc(ctx, changes.Close)()
	for {
		mended, err := b.mendFirewalls(ctx)
		for _, n := range mended {
			log.Warn("something on this host removed the nftables rules of a network; they are back", "cluster", n.Cluster, "id", n.ID)
		}
		if err != nil {
			return err
		}
		if len(mended) > 0 {
			rest(ctx, guardRest)
		}
		if err := nextRuleset(changes); err != nil {
			return err
		}
	}
}

// nextRuleset waits until a transaction has changed nftables. Messages that were lost, for there were too many, are one, too.
func nextRuleset(changes *nl.NetlinkSocket) error {
	const committed = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN
	for {
		messages, _, err := changes.Receive()
		if errors.Is(err, unix.ENOBUFS) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("following nftables: %w", err)
		}
		if slices.ContainsFunc(messages, func(m syscall.NetlinkMessage) bool { return m.Header.Type == committed }) {
			return nil
		}
	}
}

// mendFirewalls makes the rules that are missing, and returns the networks whose rules were.
func (b Box) mendFirewalls(ctx context.Context) (mended []Network, err error) {
	err = b.locked(func() error {
		networks, err := b.list()
		if err != nil {
			return err
		}
		for _, n := range networks {
			done, err := b.mendFirewall(ctx, n)
			if err != nil {
				return err
			}
			if done {
				mended = append(mended, n)
			}
		}
		return nil
	})
	return mended, err
}

// mendFirewall says whether there was something to mend. What only other capstands use is theirs to mend.
func (b Box) mendFirewall(ctx context.Context, n Network) (done bool, err error) {
	if !atomicfile.Exists(filepath.Join(b.dir(n.ID), "hosts", b.HostID)) {
		return false, nil
	}
	subnets, err := Subnets(n.CIDR, n.IPv6CIDR)
	if err != nil {
		return false, err
	}
	if whole, err := hasFirewall(n.ID, subnets); err != nil || whole {
		return false, err
	}
	return true, ensureFirewall(ctx, n.ID, MAC(n.ID, subnets[0].Gateway.String()), subnets)
}
