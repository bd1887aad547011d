package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"capstan.dev/capstan/internal/node/kube"
)

const (
	joinMinPause = 50 * time.Millisecond
	joinMaxPause = 500 * time.Millisecond
	// probeTimeout of one check whether the machine's etcd serves.
	probeTimeout = 300 * time.Millisecond
	// serveTimeout is the time in which a learner with a name must start to serve.
	serveTimeout = 500 * time.Millisecond
	// restartTime is the additional time for a restart.
	restartTime = 5 * time.Second
)

// promoteHold is the longest time that a learner waits with its vote for machines that are about to be added. etcd
// refuses new members until all voters have been connected for five seconds. Before a promotion it accepts any number
// of learners.
const promoteHold = 2 * time.Second

var errHold = errors.New("another machine is about to be added first")

// startHold is the longest time that a machine waits for another one that starts first. Two machines that start at the
// same time request the member list from each other, at ports that are open and do not serve yet. That takes ten
// seconds and then seven.
const startHold = 3 * time.Second

var errTurn = errors.New("another machine starts first")

var errNotServing = errors.New("etcd does not serve yet")

// Joining is a machine whose etcd must become a member.
type Joining struct {
	// Name of the member, which is the name of the Node.
	Name string
	// PeerURL identifies the machine's membership, because no other machine has its address.
	PeerURL string
	// DataDir of etcd.
	DataDir string
	// WALDir is the folder of etcd's log; empty if the log is in DataDir.
	WALDir string
	// Endpoints are client URLs of members. Local is that of the machine's own etcd.
	Endpoints []string
	Local     string
	TLS       *tls.Config
	// Start starts etcd with the initial cluster, and restarts it if the initial cluster has changed. It can be called
	// repeatedly.
	Start func(ctx context.Context, initialCluster string) error
	// Restart restarts etcd.
	Restart func(ctx context.Context) error
	// Others returns the peer URLs of machines that were announced within the last moments.
	Others func(ctx context.Context) ([]string, error)
	// Wanted is called before the machine requests membership. An error means that the machine must not join now. A
	// *kube.FinalError ends Join.
	Wanted func(ctx context.Context) error
	Log    *slog.Logger
}

type stepKind string

const (
	stepErase   stepKind = "erase data of a former membership"
	stepAdd     stepKind = "request membership"
	stepRemove  stepKind = "remove the former membership"
	stepStart   stepKind = "start etcd"
	stepPromote stepKind = "request the vote"
	stepJoined  stepKind = "joined"
)

type step struct {
	kind   stepKind
	member Member
}

// nextStep returns the next step of a machine that joins, from the current members of etcd. It has no state, so a
// restarted machine continues at any step.
func nextStep(members []Member, name, peerURL string, has data) step {
	i := slices.IndexFunc(members, func(m Member) bool { return slices.Contains(m.PeerURLs, peerURL) })
	switch {
	case i < 0 && has.any:
		// The member was removed. Its data can never be used again.
		return step{kind: stepErase}
	case i < 0:
		return step{kind: stepAdd}
	}
	m := members[i]
	switch {
	case !m.Started():
		return step{stepStart, m}
	case m.Name != name, !has.whole:
		// The membership belongs to a former machine with this address, or to this machine before it lost its disk. Its
		// data is lost, and a member must not return with less data than it has acknowledged.
		return step{stepRemove, m}
	case m.Learner:
		return step{stepPromote, m}
	}
	return step{stepJoined, m}
}

// initialCluster returns the list of members for the start of a new member. etcd compares only the peer URLs. A member
// that never started has no name yet.
func initialCluster(members []Member, name, peerURL string) string {
	var pairs []string
	for _, m := range members {
		called := m.Name
		if slices.Contains(m.PeerURLs, peerURL) {
			called = name
		} else if called == "" {
			called = hexID(m.ID)
		}
		for _, u := range m.PeerURLs {
			pairs = append(pairs, called+"="+u)
		}
	}
	slices.Sort(pairs)
	return strings.Join(pairs, ",")
}

// Join makes the machine's etcd a voting member and returns when it is one, or when ctx ends. It retries refused
// requests, because other machines join and leave at the same time.
func Join(ctx context.Context, j Joining) error {
	c, err := dial(j.TLS, j.Endpoints...)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	local := &http.Client{Timeout: probeTimeout, Transport: &http.Transport{TLSClientConfig: j.TLS, DisableKeepAlives: true}}
	pause, last, silentSince := joinMinPause, stepKind(""), time.Time{}
	var w patience
	for {
		s, err := j.advance(ctx, c, local, &w)
		if errors.Is(err, errNotServing) {
			if silentSince.IsZero() {
				silentSince = time.Now()
			}
			// A new member may receive the entry with its name in a snapshot. Then it waits for that entry for seven
			// seconds before it serves. After a restart it serves at once. The restart affects no other member, because
			// a learner has no vote.
			if time.Since(silentSince) > serveTimeout {
				j.Log.Info("etcd does not serve and is restarted")
				silentSince = time.Now().Add(restartTime)
				err = errors.Join(err, j.Restart(ctx))
			}
		}
		if s.kind == stepJoined && err == nil {
			j.Log.Info("etcd joined", "member", hexID(s.member.ID))
			return nil
		}
		if s.kind != last {
			j.Log.Info("etcd joins", "step", s.kind, "error", err)
			pause, last = joinMinPause, s.kind
		}
		var final *kube.FinalError
		if errors.As(err, &final) {
			return err
		}
		// There is no event when another machine is in sync or was promoted.
		select {
		case <-ctx.Done():
			return fmt.Errorf("joining etcd: %s: %w; last: %w", s.kind, context.Cause(ctx), err)
		case <-time.After(pause):
		}
		pause = min(pause*3/2, joinMaxPause)
	}
}

// patience contains the times since when the machine waits for the start and for the announcement of others.
type patience struct{ start, vote time.Time }

// more reports whether the limit of a wait is not reached yet.
func more(since *time.Time, limit time.Duration) bool {
	if since.IsZero() {
		*since = time.Now()
	}
	return time.Since(*since) < limit
}

// advance performs the next step.
func (j Joining) advance(ctx context.Context, c *client, local *http.Client, w *patience) (step, error) {
	members, err := c.members(ctx)
	if err != nil {
		return step{}, err
	}
	c.SetEndpoints(clientURLs(members)...)
	has, err := j.data()
	if err != nil {
		return step{}, fmt.Errorf("look for the data of etcd: %w", err) // Unknown data is not lost.
	}
	s := nextStep(members, j.Name, j.PeerURL, has)
	call, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	switch s.kind {
	case stepErase:
		return s, j.erase()
	case stepAdd:
		if err := j.Wanted(ctx); err != nil {
			return s, err
		}
		added, err := c.MemberAddAsLearner(call, []string{j.PeerURL})
		if err != nil {
			return s, err
		}
		return step{kind: stepStart}, j.start(ctx, membersOf(added.Members), w)
	case stepRemove:
		_, err = c.MemberRemove(call, s.member.ID)
	case stepStart:
		err = j.start(ctx, members, w)
	case stepPromote:
		if err := j.serves(ctx, local); err != nil {
			return s, err
		}
		if j.othersAreToBeAdded(ctx, members) && more(&w.vote, promoteHold) {
			return s, errHold
		}
		_, err = c.MemberPromote(call, s.member.ID)
		if errors.Is(err, rpctypes.ErrMemberNotLearner) {
			err = nil // by the agent that manages etcd
		}
		if err == nil {
			return step{stepJoined, s.member}, nil
		}
	}
	return s, err
}

// start starts etcd if no other machine must start first. It restarts etcd after each change of the members, because
// etcd refuses an outdated list.
func (j Joining) start(ctx context.Context, members []Member, w *patience) error {
	if !firstToStart(members, j.PeerURL) && more(&w.start, startHold) {
		return errTurn
	}
	return j.Start(ctx, initialCluster(members, j.Name, j.PeerURL))
}

// firstToStart reports whether a member has the lowest id of those that have not started.
func firstToStart(members []Member, peerURL string) bool {
	for _, m := range members { // in the order of ids
		if !m.Started() {
			return slices.Contains(m.PeerURLs, peerURL)
		}
	}
	return true
}

func (j Joining) othersAreToBeAdded(ctx context.Context, members []Member) bool {
	others, err := j.Others(ctx)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(others, func(url string) bool {
		return !slices.ContainsFunc(members, func(m Member) bool { return slices.Contains(m.PeerURLs, url) })
	})
}

// serves reports whether the machine's etcd serves clients. etcd's own client would pause between attempts.
func (j Joining) serves(ctx context.Context, local *http.Client) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, j.Local+"/version", nil)
	if err != nil {
		return err
	}
	resp, err := local.Do(req)
	if err != nil {
		return errors.Join(errNotServing, err)
	}
	return resp.Body.Close()
}

// data is what etcd has left on this machine, or on a volume that outlives machines.
type data struct {
	// any: there are files of a membership.
	any bool
	// whole: neither the data nor the log is missing.
	whole bool
}

// data looks for files of etcd. etcd creates them before it publishes its name.
func (j Joining) data() (data, error) {
	_, err := os.Stat(filepath.Join(j.DataDir, "member"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return data{}, err
	}
	member := err == nil
	logs, err := logsIn(j.WALDir)
	return data{any: member || len(logs) > 0, whole: member && (j.WALDir == "" || len(logs) > 0)}, err
}

// logsIn returns the files of etcd's log in a folder of its own, also those that etcd has not named yet.
func logsIn(walDir string) (files []string, err error) {
	if walDir == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(walDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".wal") || strings.HasSuffix(e.Name(), ".wal.broken") || strings.HasSuffix(e.Name(), ".tmp") {
			files = append(files, filepath.Join(walDir, e.Name()))
		}
	}
	return files, nil
}

// EraseLog removes etcd's log in a folder of its own, for example on a volume of a former machine: the first etcd of a cluster would continue
// with it as a member of the former cluster.
func EraseLog(walDir string) error {
	logs, err := logsIn(walDir)
	if err != nil {
		return err
	}
	for _, file := range logs {
		if err := os.RemoveAll(file); err != nil {
			return err
		}
	}
	return nil
}

// erase removes the data of a former membership. etcd begins anew only without its log, so the log goes first.
func (j Joining) erase() error {
	if err := EraseLog(j.WALDir); err != nil {
		return err
	}
	return os.RemoveAll(filepath.Join(j.DataDir, "member"))
}
