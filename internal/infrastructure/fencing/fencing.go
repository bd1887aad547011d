// Package fencing decides whether a host that is not connected has stopped the machines of a cluster. All functions are pure.
//
// A host stops machines after it had no contact with a manager and with any other host of the cluster for a time. So the manager
// must know when its own connection ended, and when each other host answered the lost one for the last time. Another host that
// does not answer the manager may still answer the lost one: then nothing is decided.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package fencing

import (
	"fmt"
	"time"

	"capstan.dev/capstan/internal/host/hostpb"
)

// margin is the time beyond stopAfterSeconds for which a host must be without contact. A host needs up to 20 s to notice that a manager
// is gone (hostpb.DefaultKeepalive), and some seconds to stop the machines, by its guard if capstand does not run.
const margin = 40 * time.Second

// askAgain is the time until the next decision if it depends on other hosts. Their connections and contacts are no events for machines of
// the lost host.
const askAgain = 15 * time.Second

// Lost is a host that is not connected.
type Lost struct {
	// Tunnel is its tunnel address.
	Tunnel string
	// ManagementCluster is the manager's.
	ManagementCluster string
	// Wanted is the time of spec.fencing of the CapstanHost in seconds, Acknowledged that of status.fencing; 0 without fencing.
	Wanted, Acknowledged int32
	// Away is for how long it was not connected.
	Away time.Duration
}

// Other is another host.
type Other struct {
	Name string
	// Abandoned: the administrator states that it is permanently lost.
	Abandoned bool
	// SameBox as the lost host.
	SameBox bool
	// Member: it has a machine or a load balancer of the cluster.
	Member bool
	// Connected to the manager, or for how long not.
	Connected bool
	Away      time.Duration
	// Contacts that it reports; nil if its capstand answers no probes.
	Contacts *hostpb.ListContactsResponse
}

// Decision answers whether the machines of a cluster on a lost host have stopped.
type Decision struct {
	Fenced bool
	// Why not, and when to decide again; 0: after an event of the lost host.
	Why   string
	Again time.Duration
}

// Early returns a Why if no contacts of any host lead to a decision now. Hosts can be slow, so they are asked for their contacts only
// without one.
func Early(lost Lost, others []Other) Decision {
	if lost.Wanted == 0 {
		return Decision{Why: "its spec.fencing is not set"}
	}
	if lost.Acknowledged != lost.Wanted {
		return Decision{Why: "it has not acknowledged its spec.fencing"}
	}
	for _, o := range others {
		if why := obstacle(o); why != "" {
			return Decision{Why: why, Again: askAgain}
		}
	}
	return stillCounting(lost.Away, time.Duration(lost.Acknowledged)*time.Second+margin)
}

// Decide returns the decision for one cluster. unchanged is for how long no CapstanHost was deleted: a deleted host could have
// answered the lost one.
func Decide(lost Lost, others []Other, unchanged time.Duration) Decision {
	if d := Early(lost, others); d.Why != "" {
		return d
	}
	seconds, evidence := lost.Acknowledged, false
	for _, o := range others {
		if s := announced(o, lost); s > 0 {
			// Root on a host of another tenant can report any record. It can prolong the wait, but it is no evidence.
			seconds, evidence = max(seconds, s), evidence || o.Member
		}
	}
	if !evidence {
		return Decision{Why: "no connected host of the cluster has recorded that it stops machines", Again: askAgain}
	}
	need := time.Duration(seconds)*time.Second + margin
	for _, o := range others {
		if d := decideOne(o, lost, need); d.Why != "" {
			return d
		}
	}
	if d := stillCounting(min(lost.Away, unchanged), need); d.Why != "" {
		return d
	}
	return Decision{Fenced: true}
}

// stillCounting returns a Why if the lost host has not been silent for the needed time.
func stillCounting(silent, need time.Duration) Decision {
	if silent >= need {
		return Decision{}
	}
	return waitFor(need-silent, "it stops its machines if it stays cut off")
}

// obstacle returns why no contacts of any host lead to a decision, as long as another host is in this state; empty if they can.
func obstacle(o Other) string {
	switch {
	case o.Abandoned:
		return ""
	case o.Connected && o.SameBox:
		return fmt.Sprintf("host %s on the same box is connected", o.Name)
	case !o.Connected && o.Member:
		return fmt.Sprintf("host %s of the cluster is not connected either, and the two may reach each other", o.Name)
	}
	return ""
}

// announced returns after how many seconds the lost host stops the machines of the cluster, as it has announced to another host; 0 if it has
// not.
func announced(o Other, lost Lost) int32 {
	if o.Abandoned || !o.Connected {
		return 0
	}
	for _, c := range o.Contacts.GetContacts() {
		if c.GetHost() != lost.Tunnel || !c.GetPeer() {
			continue
		}
		for _, f := range c.GetFencing() {
			if f.GetManagementCluster() == lost.ManagementCluster {
				return f.GetStopAfterSeconds()
			}
		}
	}
	return 0
}

// decideOne returns a Why if another host may have been in contact with the lost one.
func decideOne(o Other, lost Lost, need time.Duration) Decision {
	switch {
	case o.Abandoned:
		return Decision{}
	case !o.Connected && o.Away < need:
		return waitFor(need-o.Away, fmt.Sprintf("host %s was lost recently", o.Name))
	case !o.Connected || o.Contacts == nil:
		return Decision{}
	}
	if recorded := time.Duration(o.Contacts.GetRecordedMilliseconds()) * time.Millisecond; recorded < need {
		return waitFor(need-recorded, fmt.Sprintf("host %s has recorded its contacts only for a short time", o.Name))
	}
	for _, c := range o.Contacts.GetContacts() {
		if c.GetHost() != lost.Tunnel {
			continue
		}
		if c.GetReachable() {
			return Decision{Why: fmt.Sprintf("host %s reaches it", o.Name), Again: askAgain}
		}
		if age := time.Duration(c.GetAgeMilliseconds()) * time.Millisecond; age < need {
			return waitFor(need-age, fmt.Sprintf("host %s answered it %s ago", o.Name, age.Round(time.Second)))
		}
	}
	return Decision{}
}

func waitFor(d time.Duration, why string) Decision {
	return Decision{Why: why, Again: d + time.Second}
}
