// Package changes watches files. The kernel limits the inotify instances and watches of each user. The processes of all
// machines count as the host's root, and pods often as the balancers' user, so any pod can use up the limits. This package
// then continues without inotify: it checks the file every second. No other package uses inotify.
//
// Layer: library. Allowed imports: api.
package changes

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"

	"capstan.dev/capstan/internal/wakeup"
)

// period between two checks of a file without inotify.
const period = time.Second

// Of returns a channel that receives a value after each change of one or several files, which may be replaced. It reports
// changes from the return of Of until ctx is done.
func Of(ctx context.Context, path string) <-chan struct{} {
	out := wakeup.New()
	before, _ := os.Stat(path) // A missing file may be created later.
	if watcher := watch(path); watcher != nil {
		go follow(ctx, watcher, path, out)
	} else {
		go poll(ctx, path, before, out)
	}
	return out
}

// WaitFor returns when the file exists, or with the error of ctx.
func WaitFor(ctx context.Context, path string) error {
	watching, stop := context.WithCancel(ctx)
	defer stop()
	for changed := Of(watching, path); ; {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// watch watches the folder of the file. It returns nil when the inotify limits are exhausted.
func watch(path string) *fsnotify.Watcher {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil
	}
	if err := watcher.Add(filepath.Dir(path)); err != nil {
		_ = watcher.Close()
		return nil
	}
	return watcher
}

func follow(ctx context.Context, watcher *fsnotify.Watcher, path string, out wakeup.Signal) {
	defer func() { _ = watcher.Close() }()
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-watcher.Events:
			if filepath.Base(event.Name) == filepath.Base(path) {
				out.Send()
			}
		case <-watcher.Errors: // Events were lost.
			out.Send()
		}
	}
}

func poll(ctx context.Context, path string, before os.FileInfo, out wakeup.Signal) {
	ticks := time.NewTicker(period)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		now, _ := os.Stat(path)
		if changed(before, now) {
			out.Send()
		}
		before = now
	}
}

func changed(before, now os.FileInfo) bool {
	if before == nil || now == nil {
		return before != now
	}
	return !os.SameFile(before, now) || before.Size() != now.Size() || !before.ModTime().Equal(now.ModTime())
}
