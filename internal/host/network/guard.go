package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	// guardPause is the pause after an error: of the subscription to events, or of a repair.
	guardPause = 10 * time.Second
	// guardRest is the pause after a repair, which limits the load if another program removes the rules again at once.
	guardRest = time.Second
)

// GuardFirewalls restores the rules of this capstand's networks when another program on the box has removed them. A reload
// of the host's own firewall does that (`flush ruleset`). It returns when ctx is done.
func (b Box) GuardFirewalls(ctx context.Context, log *slog.Logger) {
	for ctx.Err() == nil {
		err := b.guardFirewalls(ctx, log)
		if ctx.Err() != nil {
			return
		}
		log.Error("Cannot watch the firewall rules of the networks", "error", err)
		rest(ctx, guardPause)
	}
}

// reportDamage logs the damage of folders, unless it is the reported one, and returns it. A repair of rules does not wait for the repair
// of folders.
func (b Box) reportDamage(log *slog.Logger, reported string) string {
	var damage error
	if err := b.locked(func() (err error) { _, damage, err = b.survey(); return err }); err != nil || damage == nil {
		return "" // The next list of the networks has the same error.
	}
	text := damage.Error()
	if text != reported {
		log.Error("A network has a damaged folder", "error", damage)
	}
	return text
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
	damage, repairs := "", repairs{log: log}
	for {
		damage = b.reportDamage(log, damage)
		mended, err := b.mendFirewalls(ctx)
		for _, n := range mended {
			log.Warn("Another program on this host removed the nftables rules of a network; capstand restored them", "cluster", n.Cluster, "id", n.ID)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		again := repairs.next(err)
		if len(mended) > 0 {
			rest(ctx, guardRest)
		}
		if err := nextRuleset(changes, again); err != nil {
			return err
		}
	}
}

// GuardLinks restores the bridges and tunnels of this capstand's networks, their entries for other boxes, and the VLANs of machines, when
// another program on the box has changed them. It returns when ctx is done.
func (b Box) GuardLinks(ctx context.Context, log *slog.Logger) {
	for ctx.Err() == nil {
		err := b.guardLinks(ctx, log)
		if ctx.Err() != nil {
			return
		}
		log.Error("Cannot watch the links of the networks", "error", err)
		rest(ctx, guardPause)
	}
}

func (b Box) guardLinks(ctx context.Context, log *slog.Logger) error {
	changes, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return fmt.Errorf("subscribing to changes of links: %w", err)
	}
	defer changes.Close()
	defer context.AfterFunc(ctx, changes.Close)()
	repairs := repairs{log: log}
	for {
		if err := nextMessage(changes, repairs.next(b.mendLinks(log)), removesOrChangesLinks); err != nil {
			return err
		}
		rest(ctx, guardRest) // Removals come in groups, and a check reads all entries.
	}
}

// repairs of networks. An error that lasts is logged once. The other networks get their repairs at each event.
type repairs struct {
	log      *slog.Logger
	reported string
}

// next returns the time of the next attempt after a failure; zero without one.
func (r *repairs) next(failure error) time.Time {
	if failure == nil {
		r.reported = ""
		return time.Time{}
	}
	if text := failure.Error(); text != r.reported {
		r.log.Error("Cannot repair a network; capstand tries again", "error", failure)
		r.reported = text
	}
	return time.Now().Add(guardPause)
}

// mendLinks restores the bridges and tunnels, and the VLANs also if one of those cannot be restored.
func (b Box) mendLinks(log *slog.Logger) error {
	mended, err := b.mendAll(b.mendNetwork)
	for _, n := range mended {
		log.Warn("Another program on this host changed the bridge or the tunnel of a network; capstand restored it", "cluster", n.Cluster, "id", n.ID)
	}
	return errors.Join(err, b.mendVLANs(log))
}

// removesOrChangesLinks ignores new neighbours and addresses, which are frequent and remove nothing.
func removesOrChangesLinks(m syscall.NetlinkMessage) bool {
	return slices.Contains([]uint16{unix.RTM_DELNEIGH, unix.RTM_DELADDR, unix.RTM_DELLINK, unix.RTM_NEWLINK}, m.Header.Type)
}

// mendAll repairs the networks of this capstand, and returns those that needed it. A network that cannot be repaired does not keep
// the others from their repair, and neither does a damaged folder.
func (b Box) mendAll(mend func(Network) (wasBroken bool, err error)) (mended []Network, err error) {
	err = b.locked(func() error {
		networks, err := b.list()
		for _, n := range networks {
			if !b.uses(n.ID) { // The capstands that use it repair it.
				continue
			}
			wasBroken, mendErr := mend(n)
			if mendErr != nil {
				err = errors.Join(err, fmt.Errorf("network %s of %s: %w", n.ID, n.Cluster, mendErr))
			} else if wasBroken {
				mended = append(mended, n)
			}
		}
		return err
	})
	return mended, err
}

// mendNetwork restores the missing parts of the bridge and the tunnel of a network.
func (b Box) mendNetwork(n Network) (wasBroken bool, err error) {
	if n.LAN != nil {
		return false, nil // The bridge is that of the user.
	}
	subnets, err := Subnets(n.CIDR, n.IPv6CIDR)
	if err != nil {
		return false, err
	}
	whole, err := b.hasBridge(n, subnets)
	if err == nil && whole && n.Overlay != nil {
		whole, err = b.hasOverlay(n)
	}
	if err != nil || whole {
		return false, err
	}
	return true, b.ensureLinks(n, subnets)
}

// nextRuleset waits for a transaction that changes nftables, or for a time. Lost messages also count as a transaction.
func nextRuleset(changes *nl.NetlinkSocket, until time.Time) error {
	const committed = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN
	return nextMessage(changes, until, func(m syscall.NetlinkMessage) bool { return m.Header.Type == committed })
}

// nextMessage waits for a message that matters, for the loss of messages, or for a time. Zero is no time.
func nextMessage(changes *nl.NetlinkSocket, until time.Time, matters func(syscall.NetlinkMessage) bool) error {
	for {
		var timeout unix.Timeval // without a limit
		if !until.IsZero() {
			// A timeout begins again with each message.
			timeout = unix.NsecToTimeval(max(time.Until(until), time.Microsecond).Nanoseconds())
		}
		_ = changes.SetReceiveTimeout(&timeout) // It only stores the value.
		messages, _, err := changes.Receive()
		if errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("following changes of the network: %w", err)
		}
		if slices.ContainsFunc(messages, matters) {
			return nil
		}
	}
}

// mendFirewalls creates missing rules, and returns the networks that it repaired.
func (b Box) mendFirewalls(ctx context.Context) (mended []Network, err error) {
	return b.mendAll(func(n Network) (bool, error) { return b.mendFirewall(ctx, n) })
}

// mendFirewall returns whether it repaired the network.
func (b Box) mendFirewall(ctx context.Context, n Network) (wasBroken bool, err error) {
	subnets, err := Subnets(n.CIDR, n.IPv6CIDR)
	if err != nil {
		return false, err
	}
	r, err := b.ruleset(n, subnets)
	if err != nil {
		return false, err
	}
	if whole, err := r.exists(); err != nil || whole {
		return false, err
	}
	return true, r.write(ctx)
}
