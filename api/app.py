"""Assembly of the application: state, guard, problems, routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from api import failures, login, openapi
from api.access import refuse_unruled
from api.guard import Guard
from api.intake import Intake
from api.login import device
from api.login import routes as logins
from api.metrics import RequestMetrics, ServiceCollector
from api.principals import Principals
from api.routes import (
    analysis,
    experiments,
    notifications,
    pages,
    people,
    projects,
    queue,
    runs,
    specs,
    studies,
    system,
    views,
)
from api.stream import Streams
from service.config.settings import Settings
from service.output.bounded import BoundedProcess
from service.scheduling.queue import Queue
from service.store import Store


def create_app(settings: Settings) -> FastAPI:
    """Returns the application over the store that the settings name; migrations must be current."""
    settings.check_declared()
    store = Store.open(settings)
    registry = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        app.state.streams.close()
        app.state.intake.checks.close()
        app.state.bounded.close()
        store.close()

    app = FastAPI(**openapi.DESCRIPTION, lifespan=lifespan)
    app.state.settings = settings
    app.state.store = store
    app.state.queue = Queue(store)
    app.state.catalogue = settings.catalogue()
    app.state.bounded = BoundedProcess()
    app.state.closed = settings.asks_who()
    app.state.principals = Principals(store)
    app.state.intake = Intake(store, settings, app.state.catalogue, app.state.queue)
    app.state.streams = Streams(store)
    login.install(app, settings)
    app.state.registry = registry
    registry.register(ServiceCollector(store, app.state.queue))
    app.add_middleware(Guard, settings=settings, metrics=RequestMetrics(registry))
    failures.install(app)
    include_routes(app)
    refuse_unruled(app)
    openapi.install(app)
    return app


def include_routes(app: FastAPI) -> None:
    of_experiments = experiments, studies, analysis, runs, queue, specs, views
    for module in (*of_experiments, people, projects, notifications, system, pages):
        app.include_router(module.router)
    for router in (
        experiments.across,
        analysis.across,
        logins.router,
        logins.pages,
        device.router,
        device.oauth,
    ):
        app.include_router(router)
